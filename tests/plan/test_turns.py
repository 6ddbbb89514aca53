"""Who works after whom, and who may come early because of it."""

from __future__ import annotations

import itertools

import pytest

from plan.test_planner import CARD, GIB, HERE, MIB, component, passes_of, phase, planned, seconds
from tightfit.plan.component_order import CoResidencyTracker, prefetch_reasons, schedule_of
from tightfit.plan.device_search import DeviceSearch
from tightfit.plan.forecast import add_forecast
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import Footprint, Phase
from tightfit.schema.machine import Budget
from tightfit.schema.plan import ComponentPlan, ComponentRun, Plan
from tightfit.schema.request import Request


def pipeline(encoding: int = 10**9) -> Footprint:
    """Two text encoders that take turns, a denoiser, an autoencoder of which a part is called by itself first.

    A layer of an encoder does `encoding` operations.
    """
    one, two = (component(name, "encoder", [64 * MIB] * 2, 0) for name in ("text_encoder", "text_encoder_2"))
    unet, vae = component("unet", "denoiser", [256 * MIB] * 4, 0), component("vae", "autoencoder", [64 * MIB], 0)
    encoders = tuple(passes_of(part, [encoding] * 2, 2, MIB) for part in (one, two))
    encode = Phase(name="encode", peak=MIB, allocator_bytes=MIB, calls=encoders, call_order=(0, 1, 0, 1))
    denoise = phase("denoise", passes_of(unet, [10**12] * 4, 8, MIB), MIB)
    decoding = tuple(passes_of(vae, [10**9], 1, MIB, method) for method in ("quant_conv", "decode"))
    decode = Phase(name="decode", peak=MIB, allocator_bytes=MIB, calls=decoding, call_order=(0, 1))
    return Footprint(
        pipeline="Tried", components=(one, two, unet, vae), request=Request(height=64), phases=(encode, denoise, decode)
    )


ORDER = (
    ComponentRun(component="text_encoder"),
    ComponentRun(component="text_encoder_2"),
    ComponentRun(component="text_encoder"),
    ComponentRun(component="text_encoder_2"),
    ComponentRun(component="unet", runs=8),
    ComponentRun(component="vae"),
    ComponentRun(component="vae", method="decode"),
)


def test_the_order_is_that_of_the_call() -> None:
    assert schedule_of(pipeline()) == ORDER


def test_parts_that_no_pass_uses_have_no_work() -> None:
    whole = pipeline()
    unet = next(c for c in whole.components if c.name == "unet")
    tower = [layer.model_copy(update={"name": f"tower.{layer.name}"}) for layer in unet.layers]
    more = unet.model_copy(update={"layers": (*unet.layers, *tower, tower[0].model_copy(update={"name": "head"}))})
    grown = whole.model_copy(update={"components": tuple(more if c is unet else c for c in whole.components)})
    (stint,) = (stint for stint in schedule_of(grown) if stint.component == "unet")
    assert stint.unused_blocks == ("tower", "head")


def test_who_does_not_stay_comes_early_after_who_does_not_stay_either() -> None:
    parts = {name: ComponentPlan(placement="offload") for name in ("text_encoder", "text_encoder_2", "unet", "vae")}
    (said,) = prefetch_reasons(ORDER, parts)
    assert said.decision.endswith("text_encoder_2 after text_encoder, text_encoder after text_encoder_2, "
                                  "unet after text_encoder_2, vae after unet")  # fmt: skip
    (said,) = prefetch_reasons(ORDER, parts | {"text_encoder_2": ComponentPlan()})
    assert said.decision.endswith(": vae after unet")
    assert not list(prefetch_reasons(ORDER, parts | {"unet": ComponentPlan(), "text_encoder": ComponentPlan()}))


def test_nobody_comes_early_on_another_device() -> None:
    parts = {name: ComponentPlan(placement="offload", device="cuda:1") for name in ("text_encoder", "text_encoder_2")}
    parts |= {name: ComponentPlan(placement="offload") for name in ("unet", "vae")}
    (said,) = prefetch_reasons(ORDER, parts)
    assert "unet after" not in said.decision
    assert "vae after unet" in said.decision


def test_a_plan_has_the_order_and_says_what_it_is_for() -> None:
    plan, roomy = (planned(pipeline(10**12), size) for size in (400 * MIB, 8 * GIB))
    assert plan is not None
    assert roomy is not None
    assert [without_limit(each.schedule) for each in (plan, roomy)] == [ORDER, ORDER]
    assert any("loaded during the last call before it" in reason.decision for reason in plan.reasons)
    assert not any("loaded during the last call before it" in reason.decision for reason in roomy.reasons)
    two = HERE.model_copy(update={"accelerators": (CARD, CARD.model_copy(update={"name": "cuda:1"}))})
    jointly = make_plan(pipeline(), two, Budget(devices={"cuda:0": GIB, "cuda:1": GIB}))
    assert without_limit(jointly.schedule) == ORDER


def without_limit(order: tuple[ComponentRun, ...]) -> tuple[ComponentRun, ...]:
    return tuple(stint.model_copy(update={"prefetch": None}) for stint in order)


def test_as_much_comes_early_as_the_link_can_bring_while_who_is_before_computes() -> None:
    """Behind an encoder, which waits for the link, nothing; behind 0.4 s of a denoiser that is all there, much."""
    parts = {name: ComponentPlan(placement="offload") for name in ("text_encoder", "text_encoder_2", "unet", "vae")}
    foreseen = add_forecast(pipeline(), Plan(components=parts, schedule=ORDER), CARD)
    early = {(stint.component, stint.method): stint.prefetch for stint in foreseen.schedule}
    assert early.pop(("vae", "forward")) == pytest.approx(CARD.link_rate * 0.4, rel=1e-2)
    assert set(early.values()) == {0, None}
    (said,) = foreseen.reasons
    assert said.decision.endswith(": vae after unet")


def test_who_takes_turns_comes_each_time_and_more_memory_is_never_slower() -> None:
    plans = [plan for size in range(200, 2400, 40) if (plan := planned(pipeline(), size * MIB)) is not None]
    assert len(plans) > 40
    taken = [seconds(plan) for plan in plans]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(taken))
    search = DeviceSearch(pipeline(), CARD, {}, {})
    for plan, size in zip(plans[-len(plans) :], range(2400 - 40 * len(plans), 2400, 40), strict=True):
        found = search.best(size * MIB, None)
        assert found is not None
        assert found.seconds == pytest.approx(seconds(plan))


def test_guests_come_each_time_that_another_worked_until_they_stay_together() -> None:
    guests = CoResidencyTracker()
    came = [guests.record_run(name) for name in "aabababbabaac"]
    assert came == [True, False, True, True, True, True, True, False, False, False, False, False, True]
    assert guests.on_device == {"c"}
