"""Footprint + several devices, each with its own budget → the Plan that fits, or an error with what would fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tightfit.errors import BudgetTooSmall, PlanError, unknown_name
from tightfit.plan.component_order import schedule_of
from tightfit.plan.default_rates import with_default_rates
from tightfit.plan.device_search import storages_of
from tightfit.plan.forecast import add_joint_forecast, room_within
from tightfit.plan.multi_device_search import DeviceBudget, JointSolution, MultiDeviceSearch
from tightfit.plan.presets import idle_plan, plan_for
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import Plan, Reason, Storage
from tightfit.schema.stores import default_store, default_store_rates
from tightfit.units import format_bytes, format_enough, format_seconds

__all__ = ["check_devices", "plan_jointly"]


def plan_jointly(
    footprint: Footprint, machine: Machine, budget: Budget, allowed: Collection[str], host: str | None = None
) -> Plan:
    """Return the best plan within the bytes that `budget` allows on each of several devices of `machine`.

    `host` is the device on which denoisers compute, if that is fixed. `allowed` are lossy techniques. Raises PlanError
    for unknown devices and for a CPU among them, and BudgetTooSmall if nothing fits.
    """
    known = {name: _member(machine, name) for name in budget.devices}
    check_devices({name: each.kind for name, each in known.items()}, host)
    members = [
        DeviceBudget(with_default_rates(each), room_within(each, budget.devices[each.name])) for each in known.values()
    ]
    first = None if host is None else list(known).index(host)
    rates = default_store_rates(machine, members[0].device)

    def team(storages: Mapping[str, Storage]) -> MultiDeviceSearch:
        return MultiDeviceSearch(footprint, members, rates, storages, first)

    for storages in storages_of(footprint, allowed):
        searched = team(storages)
        found = searched.best(budget.ram)
        if found is not None:
            reasons = [*_reasons(searched, found, budget.ram), *_guessed(known.values(), members)]
            return _plan(searched, machine, budget, found, reasons)
    others = [name for name in ("fp8", "int8") if name not in allowed]
    lossy = [
        name for name in others
        if any(team(stored).fits(budget.ram) for stored in storages_of(footprint, [name]) if stored)
    ]  # fmt: skip
    raise _too_small(team({}), lossy, budget)


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


def _plan(
    team: MultiDeviceSearch, machine: Machine, budget: Budget, found: JointSolution, reasons: Sequence[Reason]
) -> Plan:
    footprint, devices = team.footprint, [member.device for member in team.members]
    (host, _), *_ = found.shares
    store = default_store(spare_ram=bool(budget.ram))
    components = {c.name: idle_plan(c, store) for c in footprint.components}
    for post, share in found.shares:
        elsewhere = {} if post is host else {"device": devices[post.member].name}
        components |= {name: option.plan.model_copy(update=elsewhere) for name, option in share.options}
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
    return add_joint_forecast(footprint, plan, {each.name: each for each in devices}, team.store_rates)


def _reasons(team: MultiDeviceSearch, found: JointSolution, ram: int | None) -> Iterator[Reason]:
    """Yield why components compute where they do, and why the weights of each device are where they are."""
    (host, _), *others = found.shares
    name, alone = team.members[host.member].device.name, team.best(ram, host.member)
    gain = None if alone is None else alone.seconds - found.seconds
    size = format_bytes(team.members[host.member].size)
    for post, _ in others:
        because = f"{name} alone cannot do it within {size}"
        if gain is not None:
            because = f"on {name} alone all of it would take {format_seconds(gain)} more"
        said = f"{_listed(post.names)} compute{'s' * (len(post.names) == 1)} on {team.members[post.member].device.name}"
        yield Reason(decision=said, because=because)
    busy = {post.member for post, _ in found.shares}
    idle = [member.device.name for number, member in enumerate(team.members) if number not in busy]
    if idle:
        because = "more devices would not be faster"
        yield Reason(decision=f"{_listed(idle)} {'is' if len(idle) == 1 else 'are'} not used", because=because)
    for post, share in found.shares:
        yield from share.branch.reasons(share, team.members[post.member].size)


def _guessed(known: Collection[Accelerator], members: Sequence[DeviceBudget]) -> Iterator[Reason]:
    unrated = [each.display_name for each, member in zip(known, members, strict=True) if each != member.device]
    if unrated:
        because = f"not all rates of {_listed(unrated)} were measured (run `tightfit machine`); bytes need none"
        yield Reason(decision="times are guesses", because=because)


def _too_small(team: MultiDeviceSearch, lossy: Sequence[str], budget: Budget) -> BudgetTooSmall:
    """Return an error with what would fit: more of one device, more RAM, or a `lossy` technique not allowed so far."""
    footprint, ram = team.footprint, budget.ram
    needed = {member.device.name: team.least(number, ram) for number, member in enumerate(team.members)}
    asked = footprint.request.described if footprint.request else "this call"
    has = [f"{format_bytes(member.size)} on {member.device.name}" for member in team.members]
    has += [f"{format_bytes(ram)} of RAM"] if ram is not None else []
    would = [f"{format_enough(size)} on {name} would do" for name, size in needed.items() if size is not None]
    waiting = team.least_ram() if ram is not None else None
    would += [f"{format_enough(waiting)} of RAM would do"] if waiting is not None else []
    would += [f"allow={' or '.join(lossy)} would do"] if lossy else []
    would += ["something smaller may do"]
    said = f"{footprint.pipeline} cannot do {asked} within {_listed(has)}"
    known = {name: size for name, size in needed.items() if size is not None}
    return BudgetTooSmall(f"{said}: {'; '.join(would)}", needed_devices=known, needed_ram=waiting)


def _listed(words: Collection[str]) -> str:
    *most, last = sorted(words) if isinstance(words, frozenset) else words
    return f"{', '.join(most)} and {last}" if most else last
