"""A model on several cards of a kind, which share the rows of each call → the chart's cell."""

from __future__ import annotations

import contextlib
import re

from tightfit.catalog.known import card_called
from tightfit.errors import BudgetTooSmall, InputError
from tightfit.plan.chart_cells import ENDLESS, would_do
from tightfit.plan.explain import summarize
from tightfit.plan.rank_choice import GROUP_NAMES, NAMES
from tightfit.run.limits import Limits
from tightfit.run.rank_layout import MOST, RankLayout
from tightfit.schema.chart import Cell, ChartedCard, ChartedModel
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Budget
from tightfit.schema.plan import Plan
from tightfit.schema.results import Prediction

__all__ = ["counted_card", "rank_cell"]


def counted_card(text: str) -> tuple[int, str]:
    """Return how many cards `text` means, and of which known name: "2xrtx4090". Raises InputError for others."""
    several = re.fullmatch(r"(\d+)\s*[x×]\s*(.+)", text.strip())
    count, name = (int(several[1]), several[2]) if several else (1, text)
    if not 1 <= count <= MOST:
        raise InputError(f"{text}: there are 1 to {MOST:,} cards of a kind", cards=count)
    return count, card_called(name)


def rank_cell(
    model: ChartedModel, footprint: Footprint, column: ChartedCard, ram: int | None, alone: float | None
) -> Cell:
    """Return the result of `model` on the cards of `column`, for each of which `ram` bytes may wait in host memory.

    `footprint`: of the usual request; `alone`: the seconds that one such card takes, None if it cannot.
    """
    fields = {"model": model.name, "card": column.name}
    try:
        budget = None if ram is None else Budget(device=column.usable_bytes, ram=ram)
        found = _forecast(model, column, Limits(budget))
    except BudgetTooSmall as error:
        return Cell(**fields, summary=would_do(error))
    endless = _forecast(model, column, Limits(Budget(device=ENDLESS)))
    seconds = found.trace.seconds
    return Cell(
        **fields,
        summary=f"{_ways(found.plan)}; {summarize(found.plan, footprint)}",
        peak_bytes=max(phase.peak_bytes for phase in found.trace.phases),
        seconds=seconds,
        slowdown=seconds / endless.trace.seconds if endless.trace.seconds else 1.0,
        speedup=alone / seconds if alone and seconds else None,
    )


def _forecast(model: ChartedModel, column: ChartedCard, limits: Limits) -> Prediction:
    from tightfit.run.predict_ranks import forecast_ranks

    layout = RankLayout(column.count)
    return forecast_ranks(
        model.name, column.card, layout, {}, model.request, lambda _: contextlib.nullcontext(), limits
    )


def _ways(plan: Plan) -> str:
    """How the cards compute together."""
    groups = [GROUP_NAMES[plan.cfg_groups]] if plan.cfg_groups > 1 else []
    return ", ".join([*groups, *([NAMES[plan.context_attention]] if plan.context > 1 else [])])
