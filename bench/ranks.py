"""Simulated cards that compute a call together: time, bytes sent and peak, beside one card and each way alone.

    python bench/ranks.py [--models flux.1-dev,wan-2.1-14b] [--cards rtx4090] [--counts 2,4]

Each row is a plan for one rank of equal ones, and its call on the simulated card, whose clock runs exchanges of a ring
beside attention. Rows are written to bench/results/ranks-simulated.json as they are made; those that are there already
are not made again.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

from measuring import RESULTS, write
from tightfit import Budget, BudgetTooSmall
from tightfit.catalog.known import known_card, known_model
from tightfit.run.limits import Limits
from tightfit.run.predict import forecast
from tightfit.run.predict_ranks import SharedCall, forecast_ranks
from tightfit.run.rank_layout import RankLayout
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.plan import ContextAttention
from tightfit.schema.rank_option import RankOption
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction
from tightfit.terminal import say

MODELS = "flux.1-dev,qwen-image,wan-2.1-14b,hunyuanvideo"
CASES = {"rtx4090": (2, 4), "h100": (2, 4, 8)}
TIGHT = ("wan-2.1-14b", "rtx4090", 4, 6)  # a model on so many cards with a budget of so many GB each
NAME = "ranks-simulated"


def clocked(model: str, card: str, count: int, prediction: Prediction) -> float:
    """Seconds of the call on the simulated card."""
    accelerator, plan = known_card(card), prediction.plan
    call = SharedCall.of(model, Request(), accelerator, RankLayout(count))
    ranks = call.ranks(0, RankOption(plan.cfg_groups, plan.context_attention))
    with unlimited_card(accelerator) as simulated:
        fields = plan.model_copy(update={"device": "simulated:0"})
        run = SimulationRun(model, simulated, fields, Request(), parallel=ranks)
        run.run()
        return float(run.fitted.report().trace.seconds)


def row_of(model: str, card: str, count: int, size: int | None) -> dict[str, Any]:
    """The plan's choice, each kind of attention alone in one group, two groups, and one card."""
    limits = Limits(None if size is None else Budget(device=size * 10**9))
    row: dict[str, Any] = {"model": model, "request": known_model(model).request.described, "card": card}
    row |= {"cards": count, "budget": size}
    try:
        row["one card"] = forecast(model, card, {}, Request(), say, limits, simulated=True).trace.seconds
    except BudgetTooSmall as error:
        row["one card"] = str(error)
    fixed: dict[str, dict[str, Any]] = {
        way: {"cfg_groups": 1, "context_attention": way} for way in get_args(ContextAttention)
    }
    ways: dict[str, dict[str, Any]] = {}
    for name, choices in (fixed | {"two groups": {"cfg_groups": 2}}).items():
        try:
            alone = forecast_ranks(model, card, RankLayout(count), choices, Request(), say, limits)
            ways[name] = {"predicted": alone.trace.seconds, "clock": clocked(model, card, count, alone)}
        except BudgetTooSmall as error:
            ways[name] = {"refused": str(error)}
    try:
        found = forecast_ranks(model, card, RankLayout(count), {}, Request(), say, limits)
    except BudgetTooSmall as error:
        return row | {"ways": ways, "refused": str(error)}
    phases = {phase.name: [phase.seconds, phase.peak_reserved] for phase in found.trace.phases}
    row |= {"attention": found.plan.context_attention, "groups": found.plan.cfg_groups}
    row |= {"seconds": found.trace.seconds, "phases": phases}
    return row | {"sent": found.sent_bytes, "peak": found.peak_reserved, "ways": ways, "notes": found.trace.notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cards", default=",".join(CASES))
    parser.add_argument("--counts", help="numbers of cards, e.g. 2,4")
    options = parser.parse_args()
    file = RESULTS / f"{NAME}.json"
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() else {}
    counts = [int(each) for each in options.counts.split(",")] if options.counts else None
    cases = [
        (model, card, count, None)
        for model in options.models.split(",")
        for card in options.cards.split(",")
        for count in counts or CASES[card]
    ]
    for model, card, count, size in [*cases, *([TIGHT] if TIGHT[0] in options.models else [])]:
        key = f"{model} {count} × {card}" + (f" of {size} GB" if size else "")
        if key not in rows:
            rows[key] = row_of(model, card, count, size)
            write(NAME, {"rows": rows})
        each = rows[key]
        ways = {way: round(its.get("predicted", 0), 1) for way, its in each["ways"].items()}
        chosen = each.get("attention"), each.get("groups")
        print(key, each.get("seconds", each.get("refused")), *chosen, each["one card"], ways, flush=True)


if __name__ == "__main__":
    main()
