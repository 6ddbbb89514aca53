"""Budgets on simulated cards of exactly that size: what the planner accepts and refuses, and whether it comes true.

    python bench/budgets.py [--models sdxl,flux.1-dev] [--cards rtx4090,rtx3060] [--shares 0.15,0.3,0.6,1,1.5]
    python bench/budgets.py --models all --cards rtx4090     every known model: hours on two cores the first time
    python bench/budgets.py --models mochi-1 --cards rtx4090 --keep     the other models' rows stay as they were

A budget is a share of the bytes of all of a pipeline's weights. The card has that and not a byte more, and refuses what
does not fit. A step is what denoising takes, divided by the steps; the clock is exact, so it is measured once. Writes
bench/results/budgets-simulated.json.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from measuring import RESULTS, write
from tightfit import Budget, BudgetTooSmall, make_plan, measure_footprint
from tightfit.catalog.known import known_card, known_model, model_names
from tightfit.report.summary import fold_phases
from tightfit.run.simulate import SimulationRun
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

MODELS = "sd-1.5,sdxl,flux.1-dev"
ROOM = 2**50
STEPS = 4  # of a clip: their first is as long as the others, and playing one takes the longest
ROUND = 64  # pixels: what is a multiple of this suits every model


def requests_of(model: str) -> list[Request]:
    """What `model` is usually asked for, with as many steps (of clips: a few), and about half as high and wide."""
    usual = known_model(model).request
    usual = usual.model_copy(update={"steps": STEPS}) if usual.frames else usual
    sides = {name: max(getattr(usual, name) // 2 // ROUND, 1) * ROUND for name in ("height", "width")}
    return [usual, usual.model_copy(update=sides)]


def row_of(model: str, asked: Request, footprint: Footprint, card: Accelerator, size: int) -> dict[str, Any]:
    """One budget, planned for and played."""
    roomy = card.model_copy(update={"bytes": ROOM})
    machine = Machine(accelerators=(roomy,), ram=ROOM, pinnable=ROOM, cores=1)
    try:
        plan = make_plan(footprint, machine, Budget(device=size))
    except BudgetTooSmall as error:
        return {"refused": str(error), "needed": error.facts["needed_bytes"]}
    limited = SimulatedCard(0, card.model_copy(update={"bytes": size}), Host())
    use_cards([limited])
    told = {phase.name: phase for phase in plan.forecast}
    row: dict[str, Any] = {
        "placements": {name: part.described for name, part in plan.components.items()},
        "vae": plan.vae.described,
        "predicted_peak": max(phase.peak_bytes for phase in plan.forecast),
        "predicted": {name: phase.seconds for name, phase in told.items()},
    }
    try:
        stage = SimulationRun(model, limited, plan.model_dump(mode="json", exclude={"device"}), asked)
        stage.run()
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
    options.add_argument("--keep", action="store_true", help="rows of other models that are written already")
    chosen = options.parse_args()
    models = model_names() if chosen.models == "all" else chosen.models.split(",")
    written = json.loads((RESULTS / "budgets-simulated.json").read_text())["rows"] if chosen.keep else []
    rows = [row for row in written if row["model"] not in models]
    for model in models:
        for asked in requests_of(model):
            footprint = measure_footprint(model, asked)
            whole = sum(component.bytes for component in footprint.components)
            for card in chosen.cards.split(","):
                for share in map(float, chosen.shares.split(",")):
                    about = {"model": model, "request": asked.described, "card": card, "share": share}
                    size = int(share * whole)
                    rows.append({**about, "budget": size, **row_of(model, asked, footprint, known_card(card), size)})
                    print(rows[-1], flush=True)
            write("budgets-simulated", {"rows": rows})  # by and by


if __name__ == "__main__":
    main()
