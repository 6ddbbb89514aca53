"""Step caches within budgets: never over them, what is kept is said before the call, and skipped steps load no more."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tightfit
from apply.test_step_caches import BY_NAME, EVERY, FAMILIES, STEPS, denoiser, draw, make, strategies_of
from apply.test_step_caches import settings as fields_of
from simulator.conftest import ACCELERATOR
from tightfit.apply.weights.streamer import Streamer
from tightfit.errors import BudgetTooSmall
from tightfit.report.prediction import describe, to_mapping
from tightfit.run.argument_values import Given
from tightfit.run.call_arguments import request_of_example
from tightfit.run.count import counted
from tightfit.run.footprints import Measurer
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.footprint import Footprint
from tightfit.schema.request import Request
from tightfit.schema.results import Trace
from tightfit.schema.step_cache import STRATEGIES, StepCache
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import PIXELS, TinyCase

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20
SKIPS = (2, 4, 5)
LITTLE = 92 * MIB  # weights stream
KINDS = (torch.Tensor, torch.nn.Parameter)


def asked(case: TinyCase) -> dict[str, Any]:
    names = {"height": "height", "width": "width", "num_frames": "frames"}
    call = case.call(PIXELS)
    return {ours: call[theirs] for theirs, ours in names.items() if theirs in call} | {"steps": STEPS}


def card_of(size: int, values: Any = "shapes") -> None:
    use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": size}), Host(), values=values)])


def within(case: TinyCase, size: int, cache: StepCache | None, values: Any = "shapes") -> tuple[Any, Any, Trace]:
    """One call within `size` bytes on a card that has no more. Raises BudgetTooSmall."""
    card_of(size, values)
    pipe = make(case)
    fitted = tightfit.fit(pipe, budget=size, request=asked(case), cache=cache, device="simulated:0")
    with torch.no_grad():
        picture = pipe(**case.call(PIXELS) | {"num_inference_steps": STEPS, "output_type": "pt"})[0]
    return fitted, picture, fitted.report().trace


@st.composite
def named_caches(draw: st.DrawFn) -> tuple[str, StepCache]:
    """A family, and a step cache for it: with a threshold or an interval, or with the steps named."""
    family = draw(st.sampled_from(FAMILIES))
    strategy = draw(st.sampled_from(strategies_of(family)))
    fields = fields_of(strategy)
    allowed = STRATEGIES[strategy].fields
    if "skipped_steps" in allowed and draw(st.booleans()):
        fields["skipped_steps"] = tuple(draw(st.sets(st.integers(1, STEPS - 1), max_size=STEPS - 1)))
    for name in ("warm_up", "cool_down"):
        if name in allowed and draw(st.booleans()):
            fields[name] = draw(st.integers(0, 3))
    if "keep_on" in allowed and draw(st.booleans()):
        fields["keep_on"] = "host"
    return family, StepCache.of(fields)


def never_over_budget(named: tuple[str, StepCache], mib: int) -> None:
    family, cache = named
    try:
        fitted, _, trace = within(BY_NAME[family], mib * MIB, cache)
    except BudgetTooSmall:
        return
    said = {phase.name: phase.peak_bytes for phase in fitted.plan.forecast}
    assert max(said.values()) <= mib * MIB
    assert all(phase.peak_bytes <= said[phase.name] for phase in trace.phases)
    assert not [note for note in trace.notes if "memory" in note]


@settings(deadline=None, max_examples=6)
@given(named_caches(), st.integers(70, 130))
def test_a_budget_is_never_exceeded(named: tuple[str, StepCache], mib: int) -> None:
    never_over_budget(named, mib)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(named_caches(), st.integers(60, 130))
def test_many_budgets_are_never_exceeded(named: tuple[str, StepCache], mib: int) -> None:
    never_over_budget(named, mib)


NEVER = {
    "first-block": {"threshold": 0}, "dual-block": {"threshold": 0}, "teacache": {"threshold": 0},
    "easycache": {"threshold": 0}, "magcache": {"threshold": 0, "magnitudes": [0.5] * STEPS},
}  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("family", "strategy"),
    [("Flux", name) for name in NEVER] + [("StableDiffusion", "first-block")],
)
def test_a_threshold_that_skips_nothing_changes_nothing(family: str, strategy: str) -> None:
    """Within the same budget, on a card with numbers."""
    cache = StepCache.of(fields_of(strategy) | NEVER[strategy])
    _, wanted, _ = within(BY_NAME[family], LITTLE, None, "real")
    fitted, found, trace = within(BY_NAME[family], LITTLE, cache, "real")
    assert fitted.plan.components[trace.caches[0].component].cache == cache
    assert not trace.caches[0].skipped_steps
    assert fitted.report().lossless
    assert torch.equal(found.cpu(), wanted.cpu())


# what is kept


def footprint_of(case: TinyCase, cache: StepCache) -> Footprint:
    """Of the call that `draw` makes, with nothing that a plan might choose."""
    pipe, call = make(case), case.call(PIXELS) | {"num_inference_steps": STEPS}
    given_call = Given(call, torch.device("cpu"))
    measurer = Measurer(pipe).with_cache(cache)
    return measurer.measure(request_of_example(pipe, call), given_call, lambda _: ())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "strategy"), [("Flux", "first-block"), ("Wan", "pab"), ("StableDiffusion", "static")]
)
def test_a_plan_says_what_is_kept(family: str, strategy: str) -> None:
    """In its reasons, and in a prediction as text and JSON."""
    case = BY_NAME[family]
    cache = StepCache.of(fields_of(strategy, skipped_steps=SKIPS))
    fitted, _, trace = within(case, 400 * MIB, cache)
    (kept,) = trace.caches
    (reason,) = (each for each in fitted.plan.reasons if cache.described in each.decision)
    assert kept.kept in reason.because
    footprint = footprint_of(case, cache)
    assert footprint.kept == (kept,)
    prediction = counted(footprint, ACCELERATOR, {"level": 0}, title="tiny", card=None)
    assert kept.described in describe(prediction)
    (mapped,) = json.loads(json.dumps(to_mapping(prediction)))["caches"]
    assert mapped["device_bytes"] == kept.device_bytes > 0


def held_bytes() -> int:
    """Bytes of all tensors on the CPU that Python knows, each memory once."""
    gc.collect()
    storages = (
        each.untyped_storage() for each in gc.get_objects() if type(each) in KINDS and each.device.type == "cpu"
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_at_calls(pipe: Any, case: TinyCase) -> list[int]:
    """Bytes that are held whenever the denoiser is called, more than at its first call, when nothing is kept."""
    found: list[int] = []
    hook = getattr(pipe, denoiser(pipe)).register_forward_pre_hook(lambda *_: found.append(held_bytes()))
    gc.freeze()  # what there is by now: to look at it for each call takes seconds
    try:
        draw(pipe, case)
    finally:
        gc.unfreeze()
        hook.remove()
    return [held - found[0] for held in found]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("family", "strategy"), EVERY)
def test_what_is_kept_on_the_cpu_is_what_was_predicted(family: str, strategy: str) -> None:
    """By what tensors there are at each call, more than without a cache, and a footprint from shapes alone."""
    case = BY_NAME[family]
    lossless = STRATEGIES[strategy].lossless
    fields = fields_of(strategy) if lossless else fields_of(strategy, skipped_steps=SKIPS)
    (predicted,) = footprint_of(case, StepCache.of(fields)).kept
    pipe = make(case)
    name = denoiser(pipe)
    tightfit.fit(pipe, plan={"device": "cpu", "components": {name: {}}})
    draw(pipe, case)  # what pipelines keep from their first call on
    without = held_at_calls(pipe, case)
    fitted = tightfit.fit(pipe, plan={"device": "cpu", "components": {name: {"cache": fields}}})
    with_cache = held_at_calls(pipe, case)
    measured = max(have - had for have, had in zip(with_cache, without, strict=True))
    assert measured == predicted.device_bytes
    fitted.undo()


# what streams


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strategy", ["static", "first-block", "taylorseer", "magcache", "easycache"])
@pytest.mark.parametrize("family", ["Flux", "CogVideoX", "Wan", "StableDiffusion"])
def test_a_skip_that_is_named_loads_only_what_runs(family: str, strategy: str) -> None:
    """Each call loads the layers that it uses, and no others; a U-Net has some that it uses twice."""
    case = BY_NAME[family]
    loads: list[tuple[int, str]] = []  # call in which a layer is used for which it was loaded
    waiting: dict[str, int] = {}
    calls, uses = [-1], set[tuple[int, str]]()
    with pytest.MonkeyPatch.context() as patch, unlimited_card(ACCELERATOR) as card:
        send, need = Streamer._send, Streamer._need

        def sent(self: Any, here: Any, after: Any) -> None:
            send(self, here, after)
            if here.group not in self._resident:
                waiting[here.group.name] = here.group.size

        def needed(self: Any, group: Any) -> None:
            need(self, group)
            if group not in self._resident:
                uses.add((calls[0], group.name))
            if waiting.pop(group.name, 0):
                loads.append((calls[0], group.name))

        patch.setattr(Streamer, "_send", sent)
        patch.setattr(Streamer, "_need", needed)
        pipe = make(case)
        name = denoiser(pipe)
        plan = {"components": {name: {"cache": fields_of(strategy, skipped_steps=SKIPS), "placement": "stream",
                                      "weight_memory": "100KB"}}}  # fmt: skip
        simulation = SimulationRun(pipe, card, plan, Request(**asked(case)))
        network = simulation.components[name]
        network.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        simulation.run({"output_type": "latent"})
        (kept,) = simulation.fitted.report().trace.caches
    each_step = (calls[0] + 1) // STEPS
    assert kept.skipped_steps == SKIPS
    assert kept.loaded_in_vain == 0
    later = [each for each in loads if each[0] >= each_step]
    assert len(later) == len(set(later)) or family == "StableDiffusion"
    assert set(later) == {each for each in uses if each[0] >= each_step}
    skipped = [each for each in later if each[0] // each_step in SKIPS]
    assert len(skipped) < len(later) * len(SKIPS) / (STEPS - 1)
