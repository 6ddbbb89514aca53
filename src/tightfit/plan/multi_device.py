"""Footprint + several devices, each with its own budget → the Plan that fits, or an error with what would fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from tightfit.errors import BudgetTooSmall, PlanError, unknown_name
from tightfit.plan.component_order import schedule_of
from tightfit.plan.default_rates import with_default_rates
from tightfit.plan.device_maps import check_cards, on_whole_calls, with_device_map
from tightfit.plan.device_search import storages_of
from tightfit.plan.forecast import add_joint_forecast, bytes_within
from tightfit.plan.multi_device_search import DeviceBudget, JointSolution, MultiDeviceSearch
from tightfit.plan.overlap_search import best_overlap
from tightfit.plan.presets import idle_plan, plan_for
from tightfit.plan.splitting import Splits, SplitSolution, best_split, folded, split_reasons
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import Plan, Reason, Storage
from tightfit.schema.stores import default_store, default_store_rates
from tightfit.units import format_bytes, format_enough, format_seconds

__all__ = ["check_devices", "plan_jointly"]

_SAME = 1e-6  # seconds by which two plans may differ and still take as long


def plan_jointly(
    footprint: Footprint,
    machine: Machine,
    budget: Budget,
    allowed: Collection[str],
    host: str | None = None,
    device_map: DeviceMap | None = None,
) -> Plan:
    """Return the best plan within the bytes that `budget` allows on each of several devices of `machine`.

    `host` is the device on which denoisers compute, if that is fixed, and `device_map` fixes more. `allowed` are lossy
    techniques. Raises PlanError for unknown devices and for a CPU among them, and BudgetTooSmall if nothing fits.
    """
    known = {name: _member(machine, name) for name in budget.devices}
    check_devices({name: each.kind for name, each in known.items()}, host)
    check_cards(device_map, known)
    footprint = on_whole_calls(footprint, device_map.cards if device_map else {})
    members = [
        DeviceBudget(with_default_rates(each), bytes_within(each, budget.devices[each.name])) for each in known.values()
    ]
    first = None if host is None else list(known).index(host)
    rates = default_store_rates(machine, members[0].device)

    def search_with(storages: Mapping[str, Storage]) -> MultiDeviceSearch:
        return MultiDeviceSearch(footprint, members, rates, storages, first, device_map)

    for storages in storages_of(footprint, allowed):
        search = search_with(storages)
        whole = search.best(budget.ram)
        split = best_split(search, budget.ram, whole)
        splits, used, fastest = split or ({}, search, whole)
        balanced = search.device_map.strategy == "balanced"

        def plan_of(solution: SplitSolution, reasons: Sequence[Reason] = ()) -> Plan:
            return _plan(solution.search, machine, budget, solution.found, reasons, footprint, solution.splits)

        usual = _seconds(fastest)
        overlapped = None if balanced else best_overlap(search, budget.ram, usual, splits, plan_of)
        if overlapped is not None:
            alone = search.best(budget.ram, _host_of(overlapped.found))
            reasons = [*split_reasons(overlapped, usual), *_guessed(known.values(), members)]
            reasons += _reasons(overlapped.search, overlapped.found, overlapped.found, alone)
            return with_device_map(plan_of(overlapped, reasons), device_map)
        if fastest is not None:
            found = used.balanced(budget.ram, fastest) if balanced else fastest
            reasons = [] if split is None else list(split_reasons(split, _seconds(whole)))
            reasons += _reasons(used, found, fastest, search.best(budget.ram, _host_of(found)))
            reasons += _guessed(known.values(), members)
            return with_device_map(_plan(used, machine, budget, found, reasons, footprint, splits), device_map)
    others = [name for name in ("fp8", "int8") if name not in allowed]
    lossy = [
        name for name in others
        if any(search_with(stored).fits(budget.ram) for stored in storages_of(footprint, [name]) if stored)
    ]  # fmt: skip
    raise _too_small(search_with({}), lossy, budget)


def check_devices(kinds: Mapping[str, str], host: str | None) -> None:
    """Raise PlanError if a budget's devices (`kinds` by name) include a CPU, or if `host` is not one of them."""
    for name, kind in kinds.items():
        if kind == "cpu":
            raise PlanError(f"a budget for several devices is for cards: {name} is none", device=name)
    if host is not None and host not in kinds:
        raise PlanError(f"denoisers cannot compute on {host}: the budget names {', '.join(kinds)}", device=host)


def _member(machine: Machine, name: str) -> Accelerator:
    known = {accelerator.name: accelerator for accelerator in machine.accelerators}
    if name not in known:
        raise PlanError(unknown_name("device", name, known), device=name)
    return known[name]


def _seconds(solution: JointSolution | None) -> float:
    return math.inf if solution is None else solution.seconds


def _host_of(solution: JointSolution) -> int:
    (host, _), *_ = solution.shares
    return host.member


def _plan(
    search: MultiDeviceSearch,
    machine: Machine,
    budget: Budget,
    found: JointSolution,
    reasons: Sequence[Reason],
    footprint: Footprint,
    splits: Splits,
) -> Plan:
    """Return the plan of what was `found` for the call of `footprint`, in which `splits` are parts in `search`."""
    devices = [member.device for member in search.members]
    (host, _), *_ = found.shares
    store, device_map = default_store(spare_ram=bool(budget.ram)), search.device_map
    components = {c.name: idle_plan(c, device_map.stores.get(c.name, store)) for c in footprint.components}
    host_name = devices[host.member].name
    components |= {
        name: components[name].model_copy(update={"device": card})
        for name, card in device_map.cards.items()
        if name in components and card != host_name and components[name].placement != "resident"
    }
    for assignment, share in found.shares:
        elsewhere = {} if assignment is host else {"device": devices[assignment.member].name}
        components |= {name: option.plan.model_copy(update=elsewhere) for name, option in share.options}
    components = folded(components, splits)
    choices = {
        "components": {name: component.to_mapping() for name, component in components.items()},
        "vae": next((share.vae for _, share in found.shares if share.vae.splits), found.shares[0][1].vae).to_mapping(),
        "budget": budget.to_mapping(),
        "schedule": [run.to_mapping() for run in schedule_of(footprint)],
        "expandable_segments": all(device.expandable_refused is None for device in devices),
    }
    device = devices[host.member]
    plan = plan_for(
        footprint, device.name, separate=True, choices=choices, request=footprint.request,
        pinnable=machine.pinnable or 0, accelerator=device, placed=reasons,
    )  # fmt: skip
    return add_joint_forecast(footprint, plan, {each.name: each for each in devices}, search.store_rates)


def _reasons(
    search: MultiDeviceSearch, found: JointSolution, fastest: JointSolution, alone: JointSolution | None
) -> Iterator[Reason]:
    """Yield why components compute where they do, and why the weights of each device are where they are.

    `alone` is the best on the device of denoisers alone, if there is any.
    """
    balanced = found is not fastest
    if balanced:
        yield _balance_reason(search, found, fastest)
    (host, _), *others = found.shares
    name = search.members[host.member].device.name
    gain = None if alone is None else alone.seconds - found.seconds
    size = format_bytes(search.members[host.member].size)
    for assignment, _ in () if balanced else others:
        names = assignment.names - search.device_map.cards.keys()
        if not names:
            continue
        because, device = f"{name} alone cannot do it within {size}", search.members[assignment.member].device
        if gain is not None and gain < 0:
            because = "with what device_map fixes, that is fastest"
        elif gain is not None:
            because = f"on {name} alone all of it would take {format_seconds(gain)} more"
        text = f"{_listed(names)} compute{'s' * (len(names) == 1)} on {device.name}"
        yield Reason(decision=text, because=because)
    busy = {assignment.member for assignment, _ in found.shares}
    idle = [member.device.name for number, member in enumerate(search.members) if number not in busy]
    if idle:
        because = "more devices would not be faster"
        yield Reason(decision=f"{_listed(idle)} {'is' if len(idle) == 1 else 'are'} not used", because=because)
    for assignment, share in found.shares:
        yield from share.variant_search.reasons(share, search.members[assignment.member].size)


def _balance_reason(search: MultiDeviceSearch, found: JointSolution, fastest: JointSolution) -> Reason:
    def full(solution: JointSolution) -> str:
        shares = search.fullness(solution)
        return ", ".join(f"{shares[i]:.0%} of {m.device.name}" for i, m in enumerate(search.members))

    where = [
        f"{_listed(assignment.names)} on {search.members[assignment.member].device.name}"
        for assignment, _ in found.shares
    ]
    slower = found.seconds - fastest.seconds
    other = f"what is {format_seconds(slower)} faster" if slower > _SAME else "what takes as long on fewer devices"
    because = f"the call needs at most {full(found)}; {other} needs {full(fastest)}"
    return Reason(decision=f"balanced: {'; '.join(where)}", because=because)


def _guessed(known: Collection[Accelerator], members: Sequence[DeviceBudget]) -> Iterator[Reason]:
    unrated = [each.display_name for each, member in zip(known, members, strict=True) if each != member.device]
    if unrated:
        because = f"not all rates of {_listed(unrated)} were measured (run `tightfit machine`); bytes need none"
        yield Reason(decision="times are guesses", because=because)


def _too_small(search: MultiDeviceSearch, lossy: Sequence[str], budget: Budget) -> BudgetTooSmall:
    """Return an error with what would fit: more of one device, more RAM, or a `lossy` technique not allowed so far."""
    footprint, ram = search.footprint, budget.ram
    needed = {member.device.name: search.min_bytes(number, ram) for number, member in enumerate(search.members)}
    request = footprint.request.described if footprint.request else "this call"
    has = [f"{format_bytes(member.size)} on {member.device.name}" for member in search.members]
    has += [f"{format_bytes(ram)} of RAM"] if ram is not None else []
    would = [f"{format_enough(size)} on {name} would do" for name, size in needed.items() if size is not None]
    min_ram = search.min_ram() if ram is not None else None
    would += [f"{format_enough(min_ram)} of RAM would do"] if min_ram is not None else []
    would += [f"allow={' or '.join(lossy)} would do"] if lossy else []
    would += ["something smaller may do"]
    text = f"{footprint.pipeline} cannot do {request} within {_listed(has)}"
    if search.device_map.components:
        text += f", with {search.device_map.described}"
        would.insert(0, "leaving these to the planner would do") if search.without_map().fits(ram) else None
    known = {name: size for name, size in needed.items() if size is not None}
    return BudgetTooSmall(f"{text}: {'; '.join(would)}", needed_devices=known, needed_ram=min_ram)


def _listed(words: Collection[str]) -> str:
    *most, last = sorted(words) if isinstance(words, frozenset) else words
    return f"{', '.join(most)} and {last}" if most else last
