"""A card that loses memory in the middle of a call: the picture is the same, and the report says what happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

import tightfit
from simulator.conftest import ACCELERATOR
from tightfit import BudgetTooSmall
from tightfit.measure.modules import find_components
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20
SIZE = 250 * MIB
STEPS = 4
REQUEST = {"height": 64, "width": 64, "steps": STEPS}


def large_unet(width: int = 384) -> Any:
    """Stable Diffusion with 150 MiB of U-Net, or more if its layers are wider."""
    torch.manual_seed(0)
    pipe = next(case for case in CASES if case.name == "StableDiffusion").make()
    widths = {"block_out_channels": (256, width), "attention_head_dim": 8, "norm_num_groups": 32}
    config = dict(pipe.unet.config) | widths
    parts = pipe.components | {"unet": UNet2DConditionModel.from_config(config).eval()}
    pipe = type(pipe)(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def card_of(size: int) -> SimulatedCard:
    card = SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": size}), Host(), values="real")
    use_cards([card])
    return card


def draw(pipe: Any, happening: Callable[[int], None] = lambda step: None, **more: Any) -> torch.Tensor:
    def step_done(_: Any, step: int, __: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        happening(step)
        return kwargs

    torch.manual_seed(3)  # without a generator, latents are drawn from torch's own
    with torch.no_grad():
        found = pipe(
            "a fox", height=64, width=64, num_inference_steps=STEPS, output_type="pt", callback_on_step_end=step_done,
            **more,
        )  # fmt: skip
    return found.images.cpu()


def shrink(card: SimulatedCard, share: float, at: int) -> Callable[[int], None]:
    """Once, after the step `at`, the card loses a `share`, and what its allocator had not in use."""
    due = [at]

    def happening(step: int) -> None:
        if due == [step]:
            due.clear()
            card.allocator.empty_cache()
            card.allocator.capacity = int(card.allocator.capacity * (1 - share))

    return happening


@pytest.mark.parametrize(
    ("at", "share"),
    [
        (2, 0.5),
        *(
            pytest.param(at, share, marks=pytest.mark.slow)
            for at, share in itertools.product((0, 2, STEPS - 1), (0.1, 0.3, 0.5))
            if (at, share) != (2, 0.5)
        ),
    ],
)
def test_the_picture_is_the_same(at: int, share: float) -> None:
    wanted = draw(large_unet())
    card, pipe = card_of(SIZE), large_unet()
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")
    assert fitted.plan.components["unet"].placement == "resident"
    found = draw(pipe, shrink(card, share, at))
    assert (found - wanted).abs().max() <= 1e-5
    report = fitted.report()
    notes = [note for note in report.trace.notes if note.startswith("out of memory: planned anew within ")]
    if share == 0.5:
        (note,) = notes
        assert f"went on after {at + 3} passes that were done" in note  # two of the text encoder
        assert "unet: stream" in note
        assert fitted.plan.components["unet"].placement == "stream"
        assert report.trace.notes
        assert [phase.name for phase in report.trace.phases][:2] == ["encode", "denoise"]
    assert (draw(pipe) - wanted).abs().max() <= 1e-5  # and it stays like that
    fitted.undo()
    assert torch.equal(draw(pipe), wanted)


@pytest.mark.slow
def test_generators_draw_the_same_again() -> None:
    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (7, 8)]

    asked = {"num_images_per_prompt": 2, "eta": 1.0}  # with noise in every step
    wanted = draw(large_unet(), generator=generators(), **asked)
    card, pipe = card_of(SIZE), large_unet()
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST | {"batch": 2}, device="simulated:0")
    found = draw(pipe, shrink(card, 0.5, 1), generator=generators(), **asked)
    assert any("planned anew within" in note for note in fitted.report().trace.notes)
    assert (found - wanted).abs().max() <= 1e-5


def test_too_little_is_an_error_that_says_what_would_do() -> None:
    card, pipe = card_of(SIZE), large_unet()
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")
    with pytest.raises(BudgetTooSmall, match=r"cannot do 64×64 within .* MiB would do") as error:
        draw(pipe, shrink(card, 0.95, 1))
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    fitted.undo()
    assert {tensor.device.type for part in find_components(pipe).values() for tensor in part.parameters()} == {"cpu"}


def test_what_is_being_handled_keeps_its_traceback() -> None:
    card, pipe = card_of(SIZE), large_unet()
    tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")
    try:
        raise LookupError("an earlier one")
    except LookupError as error:
        draw(pipe, shrink(card, 0.5, 1))
        kept = error.__traceback__
    assert kept is not None


@pytest.mark.slow
def test_memory_that_comes_back_is_planned_with_again() -> None:
    wanted = draw(large_unet(), num_images_per_prompt=2)
    card, pipe = card_of(SIZE), large_unet()
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")
    with pytest.raises(BudgetTooSmall):
        draw(pipe, shrink(card, 0.97, 1))
    card.allocator.capacity = SIZE
    assert (draw(pipe, num_images_per_prompt=2) - wanted).abs().max() <= 1e-5
    assert fitted.plan.budget is not None
    assert fitted.plan.budget.device == SIZE
