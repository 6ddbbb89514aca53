"""The call is the request: whatever a pipeline is called with is measured and planned for, or learned from one call."""

from __future__ import annotations

import inspect
import random
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, UNet2DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from torch import nn

import pipeline_classes
import tightfit
from inspection import assert_same, imprint
from more_pipelines import MORE_CASES
from pipeline_classes import unets_motion
from simulator.conftest import MakeCards
from tightfit import BudgetTooSmall, PlanError, RequestError
from tightfit.run.argument_values import Given, described, dummy_value
from tightfit.run.call_arguments import Prompt, call_arguments, request_of, shape_of
from tightfit.run.footprints import Measurer
from tightfit.schema.request import Request
from tiny_pipelines import CASES, FRAMES, PIXELS, run

MIB = 2**20
TINY = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def without_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of denoisers' work, which are most of what measuring takes."""
    monkeypatch.setattr("tightfit.run.footprints.measure_variants", lambda footprint, play: ())


class Judge(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Says of a picture, an array of NumPy's, how many more steps it needs."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, picture: np.ndarray) -> np.ndarray:
        seen = self.inner(torch.from_numpy(picture).to(self.device).mean(dim=(-1, -2)))
        for block in self.blocks:
            seen = torch.relu(block(seen))
        return seen.cpu().numpy()


class UnseenPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Two denoisers take turns, and what a third network makes of their work decides how many steps follow."""

    def __init__(self, first: Any, second: Any, judge: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(first=first, second=second, judge=judge, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, size: int = 32, generator: torch.Generator | None = None) -> tuple[torch.Tensor, int]:
        picture = torch.randn(1, 3, size, size, generator=generator).to(self._execution_device)
        for step in range(2):
            network = (self.first, self.second)[step % 2]
            picture = picture - 0.1 * network(picture, step).sample
        more = 1 + int(abs(self.judge(picture.cpu().numpy())).sum() * 1000) % 3
        for step in range(more):
            picture = picture - 0.1 * (self.first, self.second)[step % 2](picture, step).sample
        return picture, more


def unseen() -> UnseenPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        size = {"block_out_channels": (64, 128), "layers_per_block": 2, "norm_num_groups": 8, "sample_size": 32}
        first, second = (UNet2DModel(**kinds, **size) for _ in range(2))
        return UnseenPipeline(first.eval(), second.eval(), Judge().eval(), DDIMScheduler())


def drawn(pipe: Any, size: int = 32) -> tuple[torch.Tensor, int]:
    picture, more = pipe(size=size, generator=torch.Generator().manual_seed(3))
    return picture.cpu(), more


def test_a_pipeline_that_nobody_has_seen(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call runs within the cap, and what that did is planned for; numbers are those of no plan."""
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 64 * 1024)
    wanted, larger = drawn(unseen()), drawn(unseen(), 48)
    (card,) = make_cards(capacity=(budget := 96 * MIB))
    pipe = unseen()
    before = imprint(pipe)
    fitted = tightfit.fit(pipe, budget=budget, device="simulated:0")
    assert "first call" in fitted.plan.reasons[0].decision
    for size, expected, foreseen in ((32, wanted, False), (32, wanted, True), (48, larger, False), (48, larger, True)):
        picture, more = drawn(pipe, size)
        assert torch.equal(picture, expected[0])
        assert more == expected[1]
        assert bool(fitted.plan.forecast) == foreseen
        told = str(fitted.report())
        assert ("could not be measured" in told) != foreseen
    assert card.held.peak <= budget
    assert max(phase.peak_bytes for phase in fitted.report().trace.phases) <= max(
        phase.peak_bytes for phase in fitted.plan.forecast
    )
    fitted.undo()
    assert_same(before, imprint(pipe))


def test_what_the_pipeline_refuses_is_its_own_error(make_cards: MakeCards) -> None:
    make_cards(capacity=512 * MIB)
    case = TINY["StableDiffusion3"]
    pipe: Any = case.make()
    with pytest.raises(Exception, match="divisible by") as untouched:
        pipe(**case.call() | {"height": 63})
    tightfit.fit(pipe, budget=512 * MIB, device="simulated:0")
    with pytest.raises(type(untouched.value), match="divisible by") as caught:
        pipe(**case.call() | {"height": 63})
    assert str(caught.value) == str(untouched.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'hieght'"):
        pipe(prompt="a fox", hieght=64)


def test_an_example_is_planned_for_at_once(make_cards: MakeCards) -> None:
    make_cards(capacity=512 * MIB)
    case = TINY["FluxImg2Img"]
    pipe: Any = case.make()
    wanted = run(case.make(), case)
    fitted = tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", example=case.call())
    plan = fitted.plan
    assert plan.forecast
    assert torch.equal(run(pipe, case).cpu(), wanted)
    assert fitted.plan is plan
    with pytest.raises(RequestError, match=r"promt.*prompt"):
        tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", example={"promt": "a fox"})
    with pytest.raises(PlanError, match="not both"):
        tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", example=case.call(), request={"height": 64})


def test_a_pipeline_may_ask_what_arguments_its_denoiser_takes(make_cards: MakeCards) -> None:
    """As many modular pipelines of diffusers do, to hand over those of their own that it has."""
    make_cards(capacity=512 * MIB)
    case = TINY["Flux"]
    pipe: Any = case.make()

    class Asking(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if "img_ids" not in inspect.signature(self.transformer.forward).parameters:
                raise TypeError("not a transformer of this pipeline")
            return super().__call__(*args, **kwargs)

    pipe.__class__ = Asking
    assert tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", example=case.call()).plan.forecast


def test_a_call_that_was_measured_is_not_measured_again(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cards(capacity=512 * MIB)
    case = TINY["Flux"]
    pipe: Any = case.make()
    tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", example=case.call())
    monkeypatch.setattr("tightfit.run.footprints._measure_call", None)
    run(pipe, case)
    pipe(**case.call() | {"prompt": "a blue owl on a branch", "guidance_scale": 5.0, "generator": None})


def test_measuring_draws_no_numbers_of_the_users_own(make_cards: MakeCards) -> None:
    make_cards(capacity=512 * MIB)
    case = TINY["StableDiffusion"]
    drawn = []
    for budget in (None, 512 * MIB):
        pipe: Any = case.make()
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if budget:
            tightfit.fit(pipe, budget=budget, device="simulated:0", example=case.call() | {"generator": None})
        picture = pipe(**case.call() | {"generator": None})[0].cpu()
        drawn.append((picture, torch.rand(1), np.random.rand(), random.random()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert drawn[0][1:] == drawn[1][1:]


def test_callbacks_are_not_called_while_measuring(make_cards: MakeCards) -> None:
    make_cards(capacity=512 * MIB)
    case = TINY["StableDiffusion"]
    pipe: Any = case.make()
    steps: list[int] = []

    def count(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return kwargs

    tightfit.fit(pipe, budget=512 * MIB, device="simulated:0")
    pipe(**case.call() | {"callback_on_step_end": count})
    assert steps == [0, 1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("strength", 0.5, 0.5),
        ("eta", float("inf"), "inf"),
        ("resize_mode", "fill", "fill"),
        ("negative_prompt", "cat", "text"),
        ("prompt_2", ["a cat", "an owl"], "text"),
        ("prompt", "word " * 100, "text of up to 512 characters"),
        ("image", Image.new("L", (96, 64)), "L image 96x64"),
        ("video", [Image.new("RGB", (96, 64))] * 9, "9 x RGB image 96x64"),
        ("latents", torch.zeros(1, 4, 8, 8, dtype=torch.float16), "float16 1x4x8x8"),
        ("mask", np.zeros((8, 8), np.float32), "float32 array 8x8"),
        ("timesteps", list(range(20)), "20 numbers"),
        ("layers", [7, 8], "[7, 8]"),
        ("attention_kwargs", {"scale": 0.5}, "{scale: 0.5}"),
    ],
)
def test_arguments_are_described_by_kind_and_size(name: str, value: Any, words: Any) -> None:
    assert described(name, value) == words


@pytest.mark.parametrize(
    "words",
    ["L image 96x64", "9 x RGB image 96x64", "float16 1x4x8x8", "float32 array 8x8", "text of up to 512 characters"],
)
def test_what_stands_in_is_described_alike(words: str) -> None:
    assert described("prompt", dummy_value(words)) == words


def test_nothing_of_a_call_is_kept_but_kinds_and_sizes() -> None:
    pipe = object.__new__(diffusers.StableDiffusionImg2ImgPipeline)
    secret = {"prompt": "a secret", "negative_prompt": "another", "image": Image.new("RGB", (64, 64), (1, 2, 3))}
    request = request_of(pipe, (), secret)
    assert request == tightfit.Request(
        height=64, width=64, arguments={"negative_prompt": "text", "image": "RGB image 64x64"}
    )
    assert shape_of(pipe, request) != shape_of(pipe, tightfit.Request(height=64, width=64))


def test_arguments_that_a_rehearsal_changes_stay_as_they_are() -> None:
    tensor, array, picture = torch.zeros(2), np.zeros(2), Image.new("L", (2, 2))
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {"a": [tensor], "b": {"c": array}, "d": picture, "generator": generator, "callback": print}
    copies = Given(given, torch.device("cuda")).simulation_copy(torch.device("cpu"))
    assert list(copies) == ["a", "b", "d", "generator"]
    copies["a"][0].add_(1), copies["b"]["c"].fill(1), copies["d"].putpixel((0, 0), 255)
    torch.rand(1, generator=copies["generator"])
    assert not tensor.any()
    assert not array.any()
    assert not picture.getpixel((0, 0))
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_a_plan_from_what_one_call_did_is_no_reason_to_refuse_the_next(
    make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(*_: Any, **__: Any) -> None:
        raise BudgetTooSmall("it is", needed_bytes=2**30)

    make_cards(capacity=64 * MIB)
    pipe = unseen()
    fitted = tightfit.fit(pipe, budget=64 * MIB, device="simulated:0")
    wanted = drawn(pipe)
    monkeypatch.setattr("tightfit.run.calibration.make_plan", too_small)
    assert torch.equal(drawn(pipe)[0], wanted[0])
    assert fitted.plan.level == 3


@pytest.mark.slow
def test_nor_is_one_that_is_kept(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which experts HiDream sends tokens to is in numbers: what one call did is found on disk by the next pipeline."""

    def too_small(*_: Any, **__: Any) -> None:
        raise BudgetTooSmall("it is", needed_bytes=2**30)

    make_cards(capacity=64 * MIB)
    case = pipeline_classes.cases()["HiDreamImage"]
    pipe: Any = case.make(2)
    tightfit.fit(pipe, budget=64 * MIB, device="simulated:0")
    run(pipe, case)
    wanted = run(pipe, case)
    monkeypatch.setattr("tightfit.run.calibration.make_plan", too_small)
    other: Any = case.make(2)
    fitted = tightfit.fit(other, budget=64 * MIB, device="simulated:0")
    assert torch.equal(run(other, case), wanted)
    assert fitted.plan.level == 3
    assert "no plan is sure to do with less" in str(fitted.report())


def test_a_clip_to_start_from_says_itself_how_many_frames_it_has() -> None:
    """A request of such a call can be made up again, though the pipeline takes no number of frames."""
    (case,) = (case for case in CASES if case.name == "CogVideoXVideoToVideo")
    pipe = case.make()
    request = request_of(pipe, (), case.call())
    assert request is not None
    assert request.frames == len(case.call()["video"])
    assert "num_frames" not in call_arguments(pipe, Prompt("a fox", seed=0), request)


def test_a_pipeline_without_a_prompt_is_measured_too() -> None:
    """Of Stable Video Diffusion, from a made-up picture."""
    (case,) = (case for case in unets_motion.CASES if case.name == "StableVideoDiffusion")
    footprint = Measurer(case.make()).measure(Request(height=PIXELS, width=PIXELS, frames=FRAMES, steps=2))
    assert [phase.name for phase in footprint.phases] == ["encode", "encode inputs", "denoise", "decode"]


def test_what_a_call_leaves_out_though_it_is_usual_is_left_out_of_the_request_too() -> None:
    """Sana's pipeline puts some hundred words of its own before a prompt, unless it is told not to."""
    (case,) = (case for case in MORE_CASES if case.name == "Sana")
    pipe, given = case.make(), case.call()
    request = request_of(pipe, (), given)
    assert request is not None
    assert request.arguments["complex_human_instruction"] is None
    measurer = Measurer(pipe)
    made_up, called = (
        measurer.measure(request, call, lambda _: ()) for call in (None, Given(given, torch.device("cpu")))
    )
    assert [phase.peak for phase in made_up.phases] == [phase.peak for phase in called.phases]


class CopyingPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Gives its picture as an array, as older ones do whatever they are asked for, after `times` calls of its U-Net."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, size: int = 96, between: bool = False) -> np.ndarray:
        picture = torch.zeros(1, 3, size, size, device=self._execution_device)
        for step in range(2):
            picture = self.unet(picture, step).sample
            if between:
                picture = picture.cpu().to(picture.device)
        if picture.max() > 1:
            picture = picture / picture.max()
        return picture.cpu().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("between", [False, True])
def test_numbers_that_are_asked_for_after_the_last_pass_decide_nothing(between: bool, make_cards: MakeCards) -> None:
    def made() -> CopyingPipeline:
        torch.manual_seed(0)
        blocks = {"block_out_channels": (32, 32), "layers_per_block": 1}
        kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        pipe = CopyingPipeline(UNet2DModel(**blocks, **kinds), DDIMScheduler())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    wanted = made()(between=between)
    make_cards()
    pipe = made()
    fitted = tightfit.fit(pipe, budget="1GB", device="simulated:0", example={"between": between})
    assert bool(fitted.plan.forecast) is not between
    assert ("could not be measured" in fitted.plan.reasons[0].because) is between
    assert np.abs(pipe(between=between) - wanted).max() < 1e-5


class Statistics(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Is never called: a pipeline takes its weights, as StableUnCLIP and VQ-Diffusion do."""

    @register_to_config
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(1, width, 1, 1))


class ReadingPipeline(CopyingPipeline):
    def __init__(self, unet: Any, scheduler: Any, statistics: Any) -> None:
        super().__init__(unet, scheduler)
        self.register_modules(statistics=statistics)

    @torch.no_grad()
    def __call__(self, size: int = 32) -> np.ndarray:
        picture = torch.zeros(1, 3, size, size, device=self._execution_device)
        return (self.unet(picture + self.statistics.mean, 1).sample).cpu().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("wish", [{"level": 3}, {"budget": "1GB"}, {"budget": "80MB", "example": {}}])
def test_weights_that_are_only_read_stay_on_the_device(wish: dict[str, Any], make_cards: MakeCards) -> None:
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(block_out_channels=(32, 32), layers_per_block=1, **kinds)
    pipe = ReadingPipeline(unet, DDIMScheduler(), Statistics())
    wanted = pipe()
    make_cards()
    fitted = tightfit.fit(pipe, device="simulated:0", **wish)
    for _ in range(2):
        assert np.abs(pipe() - wanted).max() < 1e-5
        assert fitted.plan.components["statistics"].placement == "resident"
    fitted.undo()
    assert pipe.statistics.mean.device.type == "cpu"
