"""make_plan for several devices: within each one's budget, never slower with more, hardly slower than the best."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_exhaustive import WITHIN, every_plan_of, small_footprints
from plan.test_planner import CARD, CPU, GIB, HERE, MIB, RATES, component, footprints, passes_of, phase, seconds
from plan.test_turns import pipeline as turns
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.forecast import add_forecast, add_joint_forecast, share_of
from tightfit.plan.multi_device_search import Assignment, DeviceBudget, JointSolution, MultiDeviceSearch
from tightfit.plan.planner import make_plan
from tightfit.plan.splitting import best_split
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import Plan, VaePlan
from tightfit.schema.request import Request

if TYPE_CHECKING:
    from tightfit.plan.placement_search import Solution

OTHER = CARD.model_copy(update={"name": "cuda:1"})
SLOW = CARD.model_copy(update={"name": "cuda:1", "arithmetic_rates": {"float16": 2e12}, "link_rate": 4e9})
DEVICES = {CARD.name: CARD, OTHER.name: OTHER}


def machine_with(*cards: Accelerator) -> Machine:
    return HERE.model_copy(update={"accelerators": cards})


BOTH = machine_with(CARD, OTHER)


def planned(footprint: Footprint, *sizes: int, ram: int | None = None, machine: Machine = BOTH) -> Plan | None:
    devices = {card.name: size for card, size in zip(machine.accelerators, sizes, strict=True)}
    try:
        return make_plan(footprint, machine, Budget(devices=devices, ram=ram))
    except BudgetTooSmall:
        return None


def check(footprint: Footprint, sizes: tuple[int, int], more: tuple[int, int], ram: int | None) -> None:
    plan = planned(footprint, *sizes, ram=ram)
    larger = planned(footprint, sizes[0] + more[0], sizes[1] + more[1], ram=ram)
    alone = [planned(footprint, size, ram=ram, machine=machine_with(CARD)) for size in sizes]
    alone_best = min((seconds(each) for each in alone if each is not None), default=None)
    if plan is None:
        assert alone_best is None
        return
    for told in plan.forecast:
        by_name = {plan.device: told.peak_bytes, **told.other_devices}
        assert all(by_name.get(card.name, 0) <= size for card, size in zip(BOTH.accelerators, sizes, strict=True))
    assert larger is not None
    assert seconds(larger) <= seconds(plan) * (1 + 1e-9)
    if alone_best is not None:
        assert seconds(plan) <= alone_best * (1 + 1e-9)
    assert planned(footprint, *sizes, ram=ram) == plan


pairs = st.tuples(st.integers(64 * MIB, 3 * GIB), st.integers(64 * MIB, 3 * GIB))
rams = st.none() | st.integers(MIB, 3 * GIB)


@settings(deadline=None, max_examples=25)
@given(footprints(), pairs, pairs, rams)
def test_each_budget_holds_and_more_is_never_slower(
    footprint: Footprint, sizes: tuple[int, int], more: tuple[int, int], ram: int | None
) -> None:
    check(footprint, sizes, more, ram)


@pytest.mark.slow
@settings(deadline=None, max_examples=600)
@given(footprints(), pairs, pairs, rams)
def test_each_budget_holds_and_more_is_never_slower_often(
    footprint: Footprint, sizes: tuple[int, int], more: tuple[int, int], ram: int | None
) -> None:
    check(footprint, sizes, more, ram)


def check_that_nothing_is_better(footprint: Footprint, sizes: tuple[int, int], ram: int | None) -> None:
    """Of all arrangements, with all that each device could do."""
    team = MultiDeviceSearch(footprint, list(map(DeviceBudget, BOTH.accelerators, sizes)), RATES, {})
    every = []
    for posts in team.assignments():
        fronts = [team.search(post).front(sizes[post.member], ram, minimize_ram=ram is not None) for post in posts]
        for chosen in itertools.product(*(front.within(math.inf) for front in fronts)):
            waiting = sum(found.variant_search.ram_of(found) for found in chosen)
            if ram is None or waiting <= ram:
                total = sum(f.seconds for f in chosen)
                every.append((total, (len(posts), sum(f.peak for f in chosen), waiting)))
    found = team.best(ram)
    assert (found is None) == (not every)
    if found is not None:
        fastest, less = min(every)[0], (len(found.shares), found.peaks, found.ram)
        assert (found.seconds, less) in every
        assert math.isclose(found.seconds, fastest, rel_tol=1e-9)
        assert less <= min(memory for total, memory in every if math.isclose(total, fastest, rel_tol=1e-12))


@settings(deadline=None, max_examples=40)
@given(footprints(), pairs, rams)
def test_looking_no_further_than_may_be_better_finds_the_best(
    footprint: Footprint, sizes: tuple[int, int], ram: int | None
) -> None:
    check_that_nothing_is_better(footprint, sizes, ram)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(footprints(), pairs, rams)
def test_looking_no_further_than_may_be_better_finds_the_best_often(
    footprint: Footprint, sizes: tuple[int, int], ram: int | None
) -> None:
    check_that_nothing_is_better(footprint, sizes, ram)


def best_of_all(footprint: Footprint, sizes: tuple[int, int]) -> float | None:
    """Seconds of the fastest of all that two devices can do with small pipelines."""
    best = None
    ways = [
        VaePlan(),
        *(
            VaePlan(strips=way.strip_bytes, feature_maps=way.feature_maps)
            for p in footprint.phases
            for way in p.strip_options
        ),
    ]
    parts = footprint.components
    for apart in (False, True):
        for chosen in itertools.product(*(list(every_plan_of(part)) for part in parts)):
            plans = dict(zip((part.name for part in parts), chosen, strict=True))
            if apart:
                plans["vae"] = plans["vae"].model_copy(update={"device": OTHER.name})
            for vae in ways:
                plan = Plan(device=CARD.name, components=plans, vae=vae)
                told = add_joint_forecast(footprint, plan, DEVICES, RATES).forecast
                main = max(phase.peak_bytes for phase in told)
                other = max(phase.other_devices.get(OTHER.name, 0) for phase in told)
                if (main <= sizes[0] and other <= sizes[1]) or (main <= sizes[1] and other <= sizes[0]):
                    spent = sum(phase.seconds for phase in told)
                    best = spent if best is None else min(best, spent)
    return best


@settings(deadline=None, max_examples=6)
@given(small_footprints(), pairs)
def test_the_best_of_all_is_hardly_better(footprint: Footprint, sizes: tuple[int, int]) -> None:
    usual = footprint.model_copy(update={"variants": ()})
    plan, best = planned(usual, *sizes), best_of_all(usual, sizes)
    assert (plan is None) == (best is None)
    if plan is not None and best is not None:
        assert seconds(plan) <= best * WITHIN


def pipeline() -> Footprint:
    """A denoiser of 1 GiB and an autoencoder with much room, which do not fit together into 2 GiB."""
    unet, vae = component("unet", "denoiser", [256 * MIB] * 4, 0), component("vae", "autoencoder", [64 * MIB], 0)
    decode = phase("decode", passes_of(vae, [10**10], 1, GIB), GIB).model_copy(update={"peak_between_calls": 20 * MIB})
    denoise = phase("denoise", passes_of(unet, [10**10] * 4, 8, 128 * MIB), 128 * MIB)
    return Footprint(pipeline="Tried", components=(unet, vae), request=Request(height=64), phases=(denoise, decode))


def test_what_does_not_fit_together_computes_on_two_devices() -> None:
    plan = planned(pipeline(), 1300 * MIB, 1200 * MIB)
    assert plan is not None
    assert plan.device == "cuda:0"
    assert plan.components["vae"].device == "cuda:1"
    assert {part.placement for part in plan.components.values()} == {"resident"}
    alone = planned(pipeline(), 1300 * MIB, machine=machine_with(CARD))
    assert alone is not None
    assert seconds(plan) < seconds(alone)
    said = [reason for reason in plan.reasons if reason.decision == "vae computes on cuda:1"]
    assert said
    assert "on cuda:0 alone all of it would take" in said[0].because


def test_denoisers_are_where_they_are_fastest_unless_somebody_says_where() -> None:
    machine = machine_with(SLOW.model_copy(update={"name": "cuda:0"}), OTHER)
    plan = planned(pipeline(), 2 * GIB, 2 * GIB, machine=machine)
    assert plan is not None
    assert plan.device == "cuda:1"
    budget = Budget(devices={"cuda:0": 2 * GIB, "cuda:1": 2 * GIB})
    assert make_plan(pipeline(), machine, budget, device="cuda:0").device == "cuda:0"


@settings(deadline=None, max_examples=50)
@given(footprints())
def test_an_equal_card_is_not_used_where_one_is_as_fast(footprint: Footprint) -> None:
    """Sums of times in another order differ in their last digits: by these alone, a fifth of plans used both cards."""
    one, both = planned(footprint, 64 * GIB, machine=machine_with(CARD)), planned(footprint, 64 * GIB, 64 * GIB)
    assert one is not None
    assert both is not None
    assert len(both.devices) == 1 or seconds(both) < seconds(one) * (1 - 1e-10)


def test_times_on_both_sides_of_a_rounding_limit_are_equal() -> None:
    """Both times are 8.427131135e-4 up to rounding: rounded to nine digits, one would be 1e-9 longer than the other."""
    share = (Assignment(0, frozenset({"unet"}), hosts=True), cast("Solution", None))
    tie = 0.0008427131135
    one, two = JointSolution(tie, 8, 0, (share,)), JointSolution(math.nextafter(tie, 0), 9, 0, (share, share))
    assert f"{one.seconds:.9g}" != f"{two.seconds:.9g}"
    assert one.is_better_than(two)
    assert not two.is_better_than(one)
    assert two._replace(seconds=tie * (1 - 1e-8)).is_better_than(one)


def test_a_device_too_many_is_left_alone() -> None:
    plan = planned(pipeline(), 8 * GIB, 8 * GIB)
    assert plan is not None
    assert plan.devices == ("cuda:0",)
    assert any("cuda:1 is not used" in reason.decision for reason in plan.reasons)


def test_too_little_says_what_would_do() -> None:
    with pytest.raises(BudgetTooSmall, match="200 MiB on cuda:0 and 100 MiB on cuda:1") as caught:
        make_plan(pipeline(), BOTH, Budget(devices={"cuda:0": 200 * MIB, "cuda:1": 100 * MIB}))
    needed = caught.value.facts["needed_devices"]
    for name, size in needed.items():
        sizes = {"cuda:0": 200 * MIB, "cuda:1": 100 * MIB}
        assert make_plan(pipeline(), BOTH, Budget(devices=sizes | {name: size}))
        with pytest.raises(BudgetTooSmall):
            make_plan(pipeline(), BOTH, Budget(devices=sizes | {name: size - 2 * MIB}))


@settings(deadline=None, max_examples=25)
@given(footprints())
def test_more_ram_is_said_to_do_where_it_does(footprint: Footprint) -> None:
    """Two devices with what one needs that has all the RAM it wants, and no RAM."""
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=1))
    size = int(str(error.value.facts["needed_bytes"]))
    sizes = {CARD.name: size, OTHER.name: size // 2}
    if planned(footprint, *sizes.values(), ram=1) is None:
        with pytest.raises(BudgetTooSmall, match="of RAM would do") as error:
            make_plan(footprint, BOTH, Budget(devices=sizes, ram=1))
        needed = int(str(error.value.facts["needed_ram"]))
        assert planned(footprint, *sizes.values(), ram=needed) is not None
        assert planned(footprint, *sizes.values(), ram=needed - 1) is None
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, BOTH, Budget(devices=dict.fromkeys(sizes, 1), ram=1))
    assert error.value.facts["needed_ram"] is None


@pytest.mark.parametrize(
    ("machine", "device", "said"),
    [
        (machine_with(CARD), None, "no device 'cuda:1'|unknown device|cuda:1"),
        (machine_with(CARD, CPU.model_copy(update={"name": "cuda:1"})), None, "for cards: cuda:1 is none"),
        (BOTH, "cuda:2", "cannot compute on cuda:2: the budget names cuda:0, cuda:1"),
    ],
)
def test_what_is_no_card_is_refused(machine: Machine, device: str | None, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make_plan(pipeline(), machine, Budget(devices={"cuda:0": GIB, "cuda:1": GIB}), device=device)


def test_shares_are_of_the_whole() -> None:
    footprint = pipeline()
    host, other = share_of(footprint, {"unet"}, hosts=True), share_of(footprint, {"vae"}, hosts=False)
    assert [phase.allocator_bytes for phase in host.phases] == [128 * MIB, 20 * MIB]
    assert [phase.allocator_bytes for phase in other.phases] == [0, GIB]
    assert share_of(footprint, {"unet", "vae"}, hosts=True).phases == footprint.phases


def test_one_device_is_told_as_it_is_alone() -> None:
    plan = planned(pipeline(), 8 * GIB, machine=machine_with(CARD))
    assert plan is not None
    assert add_joint_forecast(pipeline(), plan, DEVICES) == add_forecast(pipeline(), plan, CARD)


def test_encoders_that_take_turns_are_counted_each_time_that_they_come() -> None:
    """On one device they send each other away, on two they do not: what is known of one split is not of another."""
    plans = [planned(turns(), size * MIB, 3 * size * MIB // 4) for size in range(120, 1400, 40)]
    taken = [seconds(plan) for plan in plans if plan is not None]
    assert len(taken) > 20
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(taken))
    for ram in (None, 300 * MIB, 900 * MIB):
        team = MultiDeviceSearch(turns(), [DeviceBudget(card, 500 * MIB) for card in BOTH.accelerators], RATES, {})
        found, plan = team.best(ram), planned(turns(), 500 * MIB, 500 * MIB, ram=ram)
        assert found is not None
        assert plan is not None
        split = best_split(team, ram, found)
        assert (split.found if split else found).seconds == pytest.approx(seconds(plan))
        assert ram is None or found.ram <= ram
