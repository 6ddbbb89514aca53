"""Budgets on pretend cards of exactly that size: what the planner accepts and refuses, and whether it comes true.

    python bench/budgets.py [--models sdxl,flux.1-dev] [--cards rtx4090,rtx3060] [--shares 0.15,0.3,0.6,1,1.5]

A budget is a share of the bytes of all of a pipeline's weights. The card has that and not a byte more, and refuses what
does not fit. A step is what denoising takes, divided by the steps; the clock is exact, so it is measured once. Writes
bench/results/budgets-pretend.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from measuring import write
from tightfit import Budget, BudgetTooSmall, make_plan, measure_footprint
from tightfit.catalog.known import known_card
from tightfit.pretend.backend import use_cards
from tightfit.pretend.card import Card
from tightfit.pretend.clock import Host
from tightfit.records import Accelerator, Footprint, Machine, Request
from tightfit.report.summary import fold_phases
from tightfit.run.stage import Stage

MODELS = "sd-1.5,sdxl,flux.1-dev"
ROOM = 2**50
STEPS = Request(steps=4)


def row_of(model: str, footprint: Footprint, card: Accelerator, size: int) -> dict[str, Any]:
    """One budget, planned for and played."""
    roomy = card.model_copy(update={"bytes": ROOM})
    machine = Machine(accelerators=(roomy,), ram=ROOM, pinnable=ROOM, cores=1)
    try:
        plan = make_plan(footprint, machine, Budget(device=size))
    except BudgetTooSmall as error:
        return {"refused": str(error), "needed": error.facts["needed_bytes"]}
    limited = Card(0, card.model_copy(update={"bytes": size}), Host())
    use_cards([limited])
    told = {phase.name: phase for phase in plan.forecast}
    row: dict[str, Any] = {
        "placements": {name: part.described for name, part in plan.components.items()},
        "vae": plan.vae.described,
        "predicted_peak": max(phase.peak_bytes for phase in plan.forecast),
        "predicted": {name: phase.seconds for name, phase in told.items()},
    }
    try:
        stage = Stage(model, limited, plan.model_dump(mode="json", exclude={"device"}), STEPS)
        stage.play()
    except torch.OutOfMemoryError as error:
        return row | {"failed": str(error).splitlines()[0]}
    finally:
        use_cards([])
    trace = stage.fitted.report().trace
    return row | {
        "played": {phase.name: phase.seconds for phase in fold_phases(trace.phases)},
        "peak": trace.peak_bytes,
        "notes": list(trace.notes),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default=MODELS)
    options.add_argument("--cards", default="rtx4090,rtx3060")
    options.add_argument("--shares", default="0.15,0.3,0.6,1,1.5")
    chosen = options.parse_args()
    rows = []
    for model in chosen.models.split(","):
        footprint = measure_footprint(model, STEPS)
        whole = sum(component.bytes for component in footprint.components)
        for card in chosen.cards.split(","):
            for share in map(float, chosen.shares.split(",")):
                about = {"model": model, "card": card, "share": share, "budget": int(share * whole)}
                rows.append(about | row_of(model, footprint, known_card(card), about["budget"]))
                print(rows[-1], flush=True)
    write("budgets-pretend", {"rows": rows})


if __name__ == "__main__":
    main()
