"""Every known model on an RTX 4090: all on the card (level 0), and planned within 8 GB.

    python bench/models.py                          models that have no row yet: minutes for each clip
    python bench/models.py --models sdxl,z-image    these, again

Nothing is timed: requests are the usual ones, and all of it is predicted from configurations. Writes
bench/results/models-simulated.json after each model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from measuring import RESULTS, write
from tightfit.catalog.known import known_model, model_called, model_names
from tightfit.errors import BudgetTooSmall
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import inspect_pipeline
from tightfit.report.prediction import to_mapping
from tightfit.run.limits import limits_of
from tightfit.run.predict import forecast
from tightfit.schema.request import Request

CARD, BUDGET = "rtx4090", "8GB"
NAME = "models-simulated"


def predicted(model: str, choices: dict[str, Any], budget: str | None) -> dict[str, Any]:
    """Bytes that a call needs and the range of its seconds; only the former where it does not fit."""
    limits = limits_of(budget, None, [], {}) if budget else None
    try:
        told = forecast(model, CARD, choices, Request(), lambda _: contextlib.nullcontext(), limits)
    except BudgetTooSmall as error:
        return {"fits": False, "needed": error.facts["needed_bytes"], "said": str(error)}
    row = {"fits": told.fits, "needed": told.needed_bytes, "notes": list(told.trace.notes)}
    if budget:
        row["placements"] = {name: part.described for name, part in told.plan.components.items()}
        row["vae"] = told.plan.vae.described
    times = to_mapping(told)["predicted"]  # none where it does not fit
    return row | {"seconds": times["seconds"], "range": times["seconds_range"]}


def row_of(model: str) -> dict[str, Any]:
    known = known_model(model)
    parts = inspect_pipeline(build_known(known)).components
    return {
        "title": known.title,
        "pipeline": known.pipeline,
        "repository": known.repository,
        "request": known.request.described,
        "steps": known.request.steps,
        "weights": sum(part.bytes for part in parts),
        "level 0": predicted(model, {"level": 0}, None),
        BUDGET: predicted(model, {}, BUDGET),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="")
    chosen = [model_called(name) for name in options.parse_args().models.split(",") if name]
    file = RESULTS / f"{NAME}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    for model in chosen or [name for name in model_names() if name not in rows]:
        rows[model] = row_of(model)
        print(model, rows[model], flush=True)
        write(NAME, {"card": CARD, "budget": BUDGET, "rows": rows})


if __name__ == "__main__":
    main()
