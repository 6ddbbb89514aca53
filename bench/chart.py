"""What known models do on known cards, and two of them at each level: `tightfit chart`, written down.

    python bench/chart.py [--models sd-1.5,sdxl] [--cards rtx4060,rtx4090]      other cells stay as they were
    python bench/chart.py --models all                                          hours on two cores the first time
    python bench/chart.py --models all --several                               on two and four cards: hours, too
    python bench/chart.py --models ''                                           levels, RAM and questions only

Nothing is timed: all of it is planned for known cards from footprints. Also asks what `tightfit plan` says of a few
questions that the guides explain. Writes bench/results/chart-simulated.json after each model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any, NamedTuple

from measuring import RESULTS, write
from tightfit.catalog.known import known_model, model_called, model_names
from tightfit.errors import BudgetTooSmall
from tightfit.report.prediction import describe
from tightfit.run.charting import CARDS, chart_of, level_table
from tightfit.run.limits import limits_of
from tightfit.run.plan_options import call_request
from tightfit.run.predict import forecast
from tightfit.schema.chart import Chart

SEVERAL = "2xrtx4090,4xrtx4090,2xh100,4xh100"
MODELS = "sd-1.5,sdxl,flux.1-dev,ltx-video-2b,cogvideox-2b"
LEVELS = (("sdxl", "rtx4060"), ("flux.1-dev", "rtx3060"))
WITH_RAM = (["sdxl", "flux.1-dev"], ["rtx4060", "rtx4090"], 16 * 10**9)
FILE = RESULTS / "chart-simulated.json"


class Question(NamedTuple):
    """Of `tightfit plan`."""

    model: str
    card: str
    budget: str | None = None
    side: int | None = None  # pixels

    @property
    def command(self) -> str:
        words = ["tightfit plan", self.model, "--card", self.card]
        words += ["--budget", self.budget] if self.budget else []
        words += ["--height", str(self.side), "--width", str(self.side)] if self.side else []
        return " ".join(words)

    def answer(self) -> dict[str, Any]:
        """What is said, and the exit code."""
        asked = call_request({}, height=self.side, width=self.side)
        limits = limits_of(self.budget, None, [], {})
        try:
            told = forecast(self.model, self.card, {}, asked, lambda _: contextlib.nullcontext(), limits)
        except BudgetTooSmall as error:
            return {"command": self.command, "said": f"tightfit: {error}", "exit": error.exit_code}
        return {"command": self.command, "said": describe(told), "exit": 0 if told.fits else 3}


QUESTIONS = {  # what the guides explain
    "fits": Question("flux.1-dev", "rtx3060", "8GB"),
    "refused": Question("flux.1-dev", "gtx1650", side=3072),
    "smaller": Question("flux.1-dev", "gtx1650", side=2048),
}


def joined(old: Chart | None, new: Chart) -> Chart:
    """`new`, and what `old` has of models and cards that are not in it."""
    if old is None:
        return new
    fresh = {(cell.model, cell.card) for cell in new.cells}
    cards = {card.name: card for card in (*old.cards, *new.cards)}
    models = {model.name: model for model in (*old.models, *new.models)}
    cells = [*(cell for cell in old.cells if (cell.model, cell.card) not in fresh), *new.cells]
    used = {cell.card for cell in cells}
    return Chart(
        cards=tuple(sorted((cards[name] for name in used), key=lambda card: (card.count, card.bytes, card.name))),
        models=tuple(sorted(models.values(), key=lambda model: order(model.name))),
        cells=tuple(cells),
    )


def order(model: str) -> tuple[bool, str]:
    """Pictures first."""
    return known_model(model).request.frames is not None, model


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default=MODELS)
    options.add_argument("--cards", default=",".join(CARDS))
    options.add_argument("--several", action="store_true", help=f"{SEVERAL}, and nothing else")
    options.add_argument("--usual-only", action="store_true", help="nothing larger is tried: of clips that takes long")
    chosen = options.parse_args()
    named = [model_called(name) for name in chosen.models.split(",") if name not in ("", "all")]
    models = model_names() if chosen.models == "all" else named
    began = time.monotonic()

    def told(what: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what} ({done} of {total})", file=sys.stderr, flush=True)

    facts = json.loads(FILE.read_text()) if FILE.exists() else {}
    name, cards = ("several", SEVERAL) if chosen.several else ("chart", chosen.cards)
    chart = Chart.from_mapping(facts[name]) if facts.get(name) else None
    for model in models:
        chart = joined(chart, chart_of([model], cards.split(","), on_progress=told, usual_only=chosen.usual_only))
        facts[name] = chart.to_mapping()
        write("chart-simulated", facts)  # by and by
    if chosen.several:
        return
    facts["with_ram"] = chart_of(*WITH_RAM, on_progress=told).to_mapping()
    facts["levels"] = [level_table(model, [card], on_progress=told).to_mapping() for model, card in LEVELS]
    facts["plans"] = {name: question.answer() for name, question in QUESTIONS.items()}
    write("chart-simulated", facts)


if __name__ == "__main__":
    main()
