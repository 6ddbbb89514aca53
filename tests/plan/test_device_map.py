"""make_plan with a device map: what is fixed holds, balanced plans leave room on every card, nothing is lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU_ALONE, GIB, HERE, MIB, RATES, component, footprints, passes_of, phase, seconds
from plan.test_team import BOTH, OTHER, SLOW, machine_with, pairs, pipeline
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.multi_device_search import Assignment, DeviceBudget, MultiDeviceSearch
from tightfit.plan.planner import make_plan
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Budget, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request

BALANCED = DeviceMap(strategy="balanced")
NAMES = ("text_encoder", "unet", "vae")
places = st.sampled_from([None, "cuda:0", "cuda:1", "cpu", "disk"])


def planned(
    footprint: Footprint, sizes: tuple[int, int], device_map: DeviceMap | None, machine: Machine = BOTH
) -> Plan | None:
    devices = {card.name: size for card, size in zip(machine.accelerators, sizes, strict=True)}
    try:
        return make_plan(footprint, machine, Budget(devices=devices), device_map=device_map)
    except BudgetTooSmall:
        return None


def fullness(plan: Plan) -> list[float]:
    """Of the cards in its budget, fullest first."""
    assert plan.budget is not None
    return sorted((plan.predicted_peak(name) / size for name, size in plan.budget.devices.items()), reverse=True)


def every_assignment(members: int) -> Iterator[list[Assignment]]:
    """Of a denoiser, an encoder and an autoencoder; written down anew, without leaving equal ones out."""
    for chosen in itertools.product(range(members), repeat=len(NAMES)):
        host = chosen[NAMES.index("unet")]
        yield [
            Assignment(m, frozenset(n for n, at in zip(NAMES, chosen, strict=True) if at == m), m == host)
            for m in dict.fromkeys([host, *chosen])
        ]


@settings(deadline=None, max_examples=40)
@given(footprints(), pairs, st.booleans())
def test_balanced_is_the_least_full_of_all_that_are_hardly_slower(
    footprint: Footprint, sizes: tuple[int, int], unlike: bool
) -> None:
    machine = machine_with(CARD, SLOW) if unlike else BOTH
    fastest, plan = (planned(footprint, sizes, chosen, machine) for chosen in (None, BALANCED))
    assert (fastest is None) == (plan is None)
    if fastest is None or plan is None:
        return
    assert set(plan.components) == set(fastest.components) == {c.name for c in footprint.components}
    assert seconds(plan) <= seconds(fastest) * 1.02 + 2e-6
    assert fullness(plan)[0] <= max(fullness(fastest)[0] * (1 + 1e-9), 1)
    team = MultiDeviceSearch(footprint, list(map(DeviceBudget, machine.accelerators, sizes)), RATES, {})
    best = team.best(None)
    assert best is not None
    least = math.inf
    for assignments in every_assignment(2):
        found = [team.search(each).best(team.members[each.member].size, None) for each in assignments]
        if None not in found and sum(each.seconds for each in found if each) <= best.seconds * 1.02 + 1e-6:
            peaks = {a.member: each.peak for a, each in zip(assignments, found, strict=True) if each}
            least = min(least, max(peaks[m] / team.members[m].size for m in peaks))
    chosen = team.balanced(None, best)
    assert least <= max(team.fullness(chosen)) * (1 + 1e-12)
    assert round(max(team.fullness(chosen)), 2) == round(least, 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(footprints(), pairs, st.tuples(places, places, places), st.booleans())
def test_what_is_fixed_holds_and_the_rest_is_the_fastest(
    footprint: Footprint, sizes: tuple[int, int], chosen: tuple[str | None, ...], unlike: bool
) -> None:
    machine = machine_with(CARD, SLOW) if unlike else BOTH
    fixed = {name: place for name, place in zip(NAMES, chosen, strict=True) if place}
    device_map = DeviceMap(components=fixed)
    plan = planned(footprint, sizes, device_map, machine)
    team = MultiDeviceSearch(
        footprint, list(map(DeviceBudget, machine.accelerators, sizes)), RATES, {}, device_map=device_map
    )
    best = math.inf
    for assignments in every_assignment(2):
        where = {name: team.members[each.member].device.name for each in assignments for name in each.names}
        if all(where[name] == card for name, card in device_map.cards.items()):
            found = [team.search(each).best(team.members[each.member].size, None) for each in assignments]
            best = min(best, math.inf if None in found else sum(each.seconds for each in found if each))
    assert (plan is None) == (best == math.inf)
    if plan is None:
        return
    for name, place in fixed.items():
        part = plan.components[name]
        if place in ("cpu", "disk"):
            assert part.placement != "resident"
            assert part.offload_to == place
        else:
            assert plan.device_of(name) == place
    if any(part.split for part in plan.components.values()):  # only where that is faster than all whole networks
        assert seconds(plan) < best
    else:
        assert seconds(plan) == pytest.approx(best)
    assert plan.device_map == device_map
    assert bool(fixed) == any(reason.because == "device_map says so" for reason in plan.reasons)
    free = planned(footprint, sizes, None, machine)
    assert free is not None
    assert seconds(free) <= seconds(plan) * (1 + 1e-9)


def pairs_of_networks() -> Footprint:
    """Two denoisers and two autoencoders, each of 512 MiB, with variants and strips."""
    parts = [component(f"unet{i or ''}", "denoiser", [256 * MIB] * 2, 0) for i in range(2)]
    parts += [component(f"vae{i or ''}", "autoencoder", [256 * MIB] * 2, 0) for i in range(2)]
    phases = [phase(f"phase {part.name}", passes_of(part, [10**10] * 2, 4, 64 * MIB), 64 * MIB) for part in parts]
    return Footprint(pipeline="Tried", components=tuple(parts), request=Request(height=64), phases=tuple(phases))


def test_denoisers_and_autoencoders_are_separated_where_the_map_says_it() -> None:
    footprint, size = pairs_of_networks(), 1300 * MIB
    fixed = {"unet": "cuda:1", "unet1": "cuda:0", "vae": "cuda:0", "vae1": "cuda:1"}
    plan = planned(footprint, (size, size), DeviceMap(components=fixed))
    assert plan is not None
    assert {name: plan.device_of(name) for name in fixed} == fixed
    assert plan.device == "cuda:1"
    assert {part.placement for part in plan.components.values()} == {"resident"}
    assert 1024 * MIB < min(plan.predicted_peak("cuda:0"), plan.predicted_peak("cuda:1")) <= size
    together = planned(footprint, (size, size), None)
    assert together is not None
    assert together.device_of("unet") == together.device_of("unet1")
    assert seconds(plan) <= seconds(together)


def test_a_balanced_plan_leaves_room_where_the_fastest_leaves_a_card_alone() -> None:
    fastest, plan = (planned(pipeline(), (4 * GIB, 4 * GIB), chosen) for chosen in (None, BALANCED))
    assert fastest is not None
    assert plan is not None
    assert (fastest.devices, plan.devices) == (("cuda:0",), ("cuda:0", "cuda:1"))
    assert fullness(plan)[0] < fullness(fastest)[0]
    (said,) = [reason for reason in plan.reasons if reason.decision.startswith("balanced: ")]
    assert said.decision == "balanced: unet on cuda:0; vae on cuda:1"
    assert f"{fullness(plan)[0]:.0%} of cuda:" in said.because


def test_host_memory_and_disk_are_used_on_one_device_too() -> None:
    for place in ("cpu", "disk"):
        device_map = DeviceMap(components={"unet": place}, ignored=("cuda:7",))
        plan = make_plan(pipeline(), HERE, Budget(device=8 * GIB), device_map=device_map)
        assert plan.components["unet"].placement != "resident"
        assert plan.components["unet"].offload_to == place
        assert plan.components["vae"].placement == "resident"
        assert any(reason.decision == "cuda:7 is ignored" for reason in plan.reasons)
    on_cpu = make_plan(pipeline(), CPU_ALONE, device_map=DeviceMap(components={"unet": "cpu", "vae": "disk"}))
    assert (on_cpu.components["unet"].placement, on_cpu.components["vae"].offload_to) == ("resident", "disk")


def test_too_little_says_what_is_fixed_and_that_less_would_do() -> None:
    budget = Budget(devices={"cuda:0": 300 * MIB, "cuda:1": 3 * GIB})
    fixed = DeviceMap(components={"vae": "cuda:0"})
    with pytest.raises(BudgetTooSmall, match=r"with vae on cuda:0: leaving these to the planner would do") as caught:
        make_plan(pipeline(), BOTH, budget, device_map=fixed)
    needed = caught.value.facts["needed_devices"]["cuda:0"]  # type: ignore[index]
    enough = budget.model_copy(update={"devices": budget.devices | {"cuda:0": needed}})
    assert make_plan(pipeline(), BOTH, enough, device_map=fixed).device_of("vae") == "cuda:0"
    with pytest.raises(BudgetTooSmall, match="with unet on disk: "):
        make_plan(pipeline(), HERE, Budget(device=100 * MIB), device_map=DeviceMap(components={"unet": "disk"}))


def test_a_card_that_the_budget_does_not_name_is_refused() -> None:
    fixed = DeviceMap(components={"vae": "cuda:2"})
    with pytest.raises(PlanError, match="vae cannot compute on cuda:2: the plan is for cuda:0, cuda:1"):
        planned(pipeline(), (GIB, GIB), fixed)
    with pytest.raises(PlanError, match="vae cannot compute on cuda:2: the plan is for cuda:0"):
        make_plan(pipeline(), HERE, device_map=fixed)


def test_a_map_goes_through_a_file_with_its_plan() -> None:
    fixed = DeviceMap(components={"vae": OTHER.name, "unet": "cpu"}, ignored=("mps",))
    plan = planned(pipeline(), (2 * GIB, 2 * GIB), fixed)
    assert plan is not None
    assert Plan.from_text(plan.to_yaml()) == plan
    assert fixed.described == "vae on cuda:1 and unet on cpu"
