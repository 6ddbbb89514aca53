"""Two simulated cards, each of exactly its budget: what is planned for both, whether it comes true, and what it gains.

    python bench/several.py [--models sdxl,flux.1-dev] [--cards rtx4090,rtx4090] [--shares 0.15,0.3,0.6]

A budget is a share of the bytes of all of a pipeline's weights, the same for both cards; the same call on the first of
them alone stands beside. Cards refuse what does not fit; their clock is exact. Writes
bench/results/several-simulated.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from budgets import ROOM, STEPS, requests_of
from measuring import write
from tightfit import Budget, BudgetTooSmall, make_plan, measure_footprint
from tightfit.catalog.known import known_card
from tightfit.report.summary import fold_phases
from tightfit.run.simulate import SimulationRun
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

MODELS = "sd-1.5,sdxl,sd3-medium,flux.1-dev,cogvideox-2b,wan-2.1-1.3b"


def planned(footprint: Footprint, names: list[str], size: int) -> Plan | BudgetTooSmall:
    """For as many of the cards called `names` as there are, each with `size` bytes."""
    cards = tuple(
        known_card(name).model_copy(update={"bytes": ROOM, "name": f"simulated:{place}"})
        for place, name in enumerate(names)
    )
    machine = Machine(accelerators=cards, ram=ROOM, pinnable=ROOM, cores=1)
    try:
        return make_plan(footprint, machine, Budget(devices={card.name: size for card in cards}))
    except BudgetTooSmall as error:
        return error


def row_of(model: str, asked: Request, plan: Plan | BudgetTooSmall, names: list[str], size: int) -> dict[str, Any]:
    """A plan, played."""
    if isinstance(plan, BudgetTooSmall):
        return {"refused": str(plan)}
    host = Host()
    cards = [
        SimulatedCard(place, known_card(name).model_copy(update={"bytes": size}), host)
        for place, name in enumerate(names)
    ]
    use_cards(cards)
    row: dict[str, Any] = {
        "placements": {name: part.described for name, part in plan.components.items()},
        "vae": plan.vae.described,
        "predicted_peaks": {name: plan.predicted_peak(name) for name in plan.devices},
        "predicted": {phase.name: phase.seconds for phase in plan.forecast},
    }
    try:
        stage = SimulationRun(
            model, next(card for card in cards if f"simulated:{card.index}" == plan.device), plan, asked
        )
        stage.run()
    except torch.OutOfMemoryError as error:
        return row | {"failed": str(error).splitlines()[0]}
    finally:
        use_cards([])
    trace = stage.fitted.report().trace
    others = (name for name in plan.devices if name != plan.device)
    peaks = {plan.device: trace.peak_bytes}
    peaks |= {name: max(phase.other_devices[name] for phase in trace.phases) for name in others}
    return row | {
        "played": {phase.name: phase.seconds for phase in fold_phases(trace.phases)},
        "peaks": peaks,
        "notes": list(trace.notes),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default=MODELS)
    options.add_argument("--cards", default="rtx4090,rtx4090")
    options.add_argument("--shares", default="0.15,0.3,0.6")
    chosen = options.parse_args()
    names, rows = chosen.cards.split(","), []
    for model in chosen.models.split(","):
        asked = requests_of(model)[0].model_copy(update={"steps": STEPS})
        footprint = measure_footprint(model, asked)
        whole = sum(component.bytes for component in footprint.components)
        for share in map(float, chosen.shares.split(",")):
            size = int(share * whole)
            about = {"model": model, "request": asked.described, "cards": names, "share": share, "budget": size}
            for some in (names[:1], names):
                plan = planned(footprint, some, size)
                rows.append({**about, "used": len(some), **row_of(model, asked, plan, some, size)})
                print(rows[-1], flush=True)
            write("several-simulated", {"rows": rows})  # by and by


if __name__ == "__main__":
    main()
