"""Footprint + Machine + Budget → the Plan that fits, changes no numbers, is fastest, and takes least, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.forecast import forecast
from tightfit.plan.levels import plan_for
from tightfit.plan.options import Option
from tightfit.plan.search import Found, Search
from tightfit.records import (
    Accelerator,
    Budget,
    Component,
    ComponentPlan,
    Footprint,
    Home,
    Machine,
    Plan,
    Reason,
    Storage,
    check_techniques,
)
from tightfit.units import format_bytes

__all__ = ["make_plan"]

# of an ordinary card of 2020, where nothing was measured
GUESSED: Mapping[str, object] = {
    "arithmetic_rates": {"float32": 5e12, "float16": 2e13, "bfloat16": 2e13},
    "memory_rate": 3e11,
    "link_rate": 1e10,
    "launch_overhead": 1e-5,
}
RATES = {"arithmetic_rates", "memory_rate", "link_rate"}  # a host may launch in no time


def make_plan(
    footprint: Footprint, machine: Machine, budget: Budget, allow: Sequence[str] = (), *, device: str | None = None
) -> Plan:
    """The best plan for the call that `footprint` tells of, within `budget` on `machine`'s `device` (None: its first).

    Lossless where that fits at all; else by the lossy techniques that `allow` names. Raises PlanError for a footprint
    without a request, unknown devices and techniques, and BudgetTooSmall where nothing fits.
    """
    allowed = check_techniques(allow)
    if not footprint.phases:
        raise PlanError(f"this footprint of {footprint.pipeline} tells of no call: measure it with a request")
    known = _accelerator(machine, device)
    accelerator = _rated(known)
    free = accelerator.bytes if accelerator.free is None else accelerator.free
    size = min(budget.device or free, accelerator.bytes)
    for storages in _storages(footprint, allowed):
        search = Search(footprint, accelerator, machine.disk_rate, storages)
        found = search.best(size, budget.ram)
        if found is not None:
            placed = [*search.reasons(found, size), *([] if accelerator == known else [_guessed(known)])]
            return _plan(footprint, accelerator, machine, budget, found, placed)
    raise _too_small(footprint, machine, accelerator, size, budget.ram, allowed)


def _too_small(
    footprint: Footprint, machine: Machine, device: Accelerator, size: int, ram: int | None, allowed: Sequence[str]
) -> BudgetTooSmall:
    """What would fit: more of the device, or more RAM, or what is lossy and was not allowed."""
    search = Search(footprint, device, machine.disk_rate, {})
    needed, host = search.least(ram), None
    if needed is None:  # however large the device is
        needed, host = search.least(None), search.least_ram(size)
    enough = Budget(device=needed or size, ram=None if host else ram)
    found = search.best(needed or size, enough.ram)
    told = _plan(footprint, device, machine, enough, found).forecast if found else ()
    phase = max(told, key=lambda phase: phase.peak_bytes).name if told else None
    asked = footprint.request.described if footprint.request else "this call"
    said = f"{footprint.pipeline} cannot do {asked} within {format_bytes(size)} on {device.called}"
    said += f" and {format_bytes(ram)} of RAM" if ram is not None else ""
    would = [f"{format_bytes(needed)} would do, for {phase}" if needed and needed > size else ""]
    would += [f"{format_bytes(host)} of RAM would do" if host else ""]
    lossy = [
        name for name in ("fp8", "int8") if name not in allowed and _fits(footprint, machine, device, size, ram, name)
    ]
    would += [f"allow={' or '.join(lossy)} would do"] if lossy else []
    would += ["something smaller may do"]
    return BudgetTooSmall(
        f"{said}: {'; '.join(filter(None, would))}", needed_bytes=needed, needed_ram=host, phase=phase
    )


def _fits(footprint: Footprint, machine: Machine, device: Accelerator, size: int, ram: int | None, name: str) -> bool:
    options = list(_storages(footprint, [name]))[1:]
    return any(Search(footprint, device, machine.disk_rate, storages).best(size, ram) for storages in options)


def _accelerator(machine: Machine, device: str | None) -> Accelerator:
    for accelerator in machine.accelerators:
        if device in (None, accelerator.name):
            if accelerator.is_cpu:
                raise PlanError(f"a budget is for a device with memory of its own, which {accelerator.name} has not")
            return accelerator
    names = ", ".join(accelerator.name for accelerator in machine.accelerators)
    raise PlanError(f"no device {device} in this machine: there is {names}", device=device)


def _rated(accelerator: Accelerator) -> Accelerator:
    """`accelerator` with rates where it has none: those of an ordinary card, so that what is faster is still found."""
    known = {name: rate for name in GUESSED if (rate := getattr(accelerator, name))}
    return accelerator if known.keys() >= RATES else accelerator.model_copy(update={**GUESSED, **known})


def _guessed(accelerator: Accelerator) -> Reason:
    return Reason(
        decision="times are guesses", because=f"not all rates of {accelerator.called} were measured; bytes are none"
    )


def _storages(footprint: Footprint, allowed: Sequence[str]) -> Iterator[Mapping[str, Storage]]:
    """In what components are stored: as they are; where that does not fit, more and more of them in eight bits."""
    yield {}
    storages: list[Storage] = ["float8_e4m3fn"] * ("fp8" in allowed) + ["int8"] * ("int8" in allowed)  # type: ignore[assignment]
    roles = {role: [c.name for c in footprint.components if c.role == role] for role in ("denoiser", "encoder")}
    for storage in storages:
        for some in ([roles["denoiser"]], [roles["encoder"]], [*roles.values()]):
            yield {name: storage for names in some for name in names}


def _plan(
    footprint: Footprint,
    accelerator: Accelerator,
    machine: Machine,
    budget: Budget,
    found: Found,
    placed: Sequence[Reason] = (),
) -> Plan:
    """What was found, as a plan; `placed` says why weights are where they are."""
    chosen = dict(found.options)
    choices = {
        "components": {c.name: _component_plan(c, chosen, budget).to_mapping() for c in footprint.components},
        "vae": found.vae.to_mapping(),
        "budget": budget.to_mapping(),
        "growing_segments": True,
    }
    plan = plan_for(
        footprint, accelerator.name, separate=True, choices=choices, request=footprint.request,
        pinnable=machine.pinnable or 0, accelerator=accelerator, placed=placed,
    )  # fmt: skip
    return plan.model_copy(update={"forecast": forecast(footprint, plan, accelerator, machine.disk_rate)})


def _component_plan(component: Component, chosen: Mapping[str, Option], budget: Budget) -> ComponentPlan:
    """As chosen; what never works comes when somebody asks for it after all."""
    if component.name in chosen:
        return chosen[component.name].plan
    home: Home = "disk" if budget.ram else "host"
    return ComponentPlan(placement="per-phase", home=home)
