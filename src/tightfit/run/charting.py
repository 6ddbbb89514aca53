"""Names of models and cards → a Chart or one model's LevelTable, as text or as a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tightfit.catalog.known import card_called, known_card, known_model, model_called, model_names
from tightfit.errors import InputError
from tightfit.files import replacing
from tightfit.plan.chart_cells import cell_of, charted_card, fits_card, host_bytes, level_rows, plan_seconds
from tightfit.plan.default_rates import ANY_CARD
from tightfit.report.chart import as_markdown, describe_chart, describe_levels, levels_as_markdown
from tightfit.run.answer_cache import cached
from tightfit.run.charting_ranks import counted_card, rank_cell
from tightfit.run.max_request import find_max_request, rungs_above
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel, Largest, LevelTable, Preset
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.request import Request
from tightfit.units import parse_bytes

__all__ = [
    "CARDS",
    "LEVELS",
    "ProgressCallback",
    "Sources",
    "chart_from_options",
    "chart_of",
    "chart_text",
    "check_out",
    "level_table",
    "simulated_preset",
    "write_chart",
]


# one of each memory size
CARDS = ("gtx1650", "rtx2060", "rtx4060", "rtx3080", "rtx3060", "rtx4080", "rtx4090", "rtx5090", "rtx6000-ada", "h100")
TABLE_CARD = "rtx4090"

ProgressCallback = Callable[[str, int, int], None]  # name of the current step, steps done, total steps


class Sources(NamedTuple):
    """Functions that return a model's footprint, a level simulated on a card with unlimited memory, and the cell of
    several cards, given a footprint, the bytes of RAM for each and the seconds of one.
    """

    footprint: Callable[[str, Request], Footprint]
    preset: Callable[[str, int, Footprint, Accelerator], Preset]
    several: Callable[[ChartedModel, Footprint, ChartedCard, int | None, float | None], Cell] = rank_cell


def chart_of(
    models: Sequence[str] = (),
    cards: Sequence[str] = (),
    ram: int | None = None,
    *,
    usual_only: bool = False,
    on_progress: ProgressCallback = lambda what, done, total: None,
    sources: Sources | None = None,
) -> Chart:
    """Chart `models` of the catalog (none: all) on `cards` (none: CARDS) with `ram` bytes of RAM (None: unlimited).

    "2xrtx4090" are two cards of a computer, which share the rows of each call; RAM is for each. With `usual_only`, no
    requests larger than a model's usual one are tried. InputError for unknown names.
    """
    names = list(dict.fromkeys(map(model_called, models))) or list(model_names())
    wanted = dict.fromkeys(map(counted_card, cards or CARDS))
    known = {name: known_card(name) for _, name in wanted}
    every = [charted_card(name, known[name], count) for count, name in wanted]
    columns = sorted(every, key=lambda card: (card.count, card.bytes))
    alone, several = sum(card.count == 1 for card in columns), sum(card.count > 1 for card in columns)
    requests = {name: known_model(name).request for name in names}
    larger = {name: 0 if usual_only or not alone else len(rungs_above(usual)) for name, usual in requests.items()}
    steps = {name: (len(LEVELS) if alone else 0) + 1 + more + several for name, more in larger.items()}
    rows, cells, before = [], [], 0
    for name in names:
        progress = _Progress(on_progress, before, sum(steps.values()))
        work = _ModelRow(
            name, requests[name], columns, known, ram, sources or Sources(_measured, simulated_preset), progress
        )
        rows.append(work.model)
        cells += work.cells(larger=not usual_only)
        before += steps[name]
    on_progress("", before, before)
    return Chart(cards=tuple(columns), models=tuple(rows), cells=tuple(cells), ram=ram)


def level_table(
    model: str,
    cards: Sequence[str] = (),
    ram: int | None = None,
    *,
    on_progress: ProgressCallback = lambda what, done, total: None,
    sources: Sources | None = None,
) -> LevelTable:
    """Return levels 0–3 of `model`, simulated on the card in `cards` (none: an RTX 4090), and the plan made for it.

    InputError for unknown names, and for more than one card.
    """
    name = model_called(model)
    if len(cards) > 1:
        raise InputError(f"a level table is of one card, not of {len(cards)}: {', '.join(cards)}", cards=list(cards))
    card = card_called(cards[0] if cards else TABLE_CARD)
    accelerator, request = known_card(card), known_model(name).request
    functions, progress = sources or Sources(_measured, simulated_preset), _Progress(on_progress, 0, len(LEVELS) + 1)
    progress.next(f"{name}, {request.described}")
    footprint = functions.footprint(name, request)
    presets = []
    for level in LEVELS:
        progress.next(f"{name}, level {level}")
        presets.append(functions.preset(name, level, footprint, accelerator))
    column = charted_card(card, accelerator)
    rows = tuple(level_rows(footprint, column, accelerator, presets, ram))
    return LevelTable(model=name, request=request, card=column, rows=rows)


def chart_from_options(
    models: str | None,
    cards: str | None,
    ram: str | None,
    level_table_of: str | None,
    on_progress: ProgressCallback,
    *,
    usual_only: bool = False,
) -> Chart | LevelTable:
    """Make the chart for the command's options: comma-separated names, and a size. InputError for invalid ones."""
    names, size = _names(cards), None if ram is None else parse_bytes(ram)
    if level_table_of is None:
        return chart_of(_names(models), names, size, on_progress=on_progress, usual_only=usual_only)
    if models is not None:
        raise InputError(f"--level-table {level_table_of} is of one model: leave out --models {models}", models=models)
    return level_table(level_table_of, names, size, on_progress=on_progress)


def _names(words: str | None) -> list[str]:
    return [name.strip() for name in words.split(",")] if words is not None else []


@dataclass
class _Progress:
    on_progress: ProgressCallback
    done: int
    total: int

    def next(self, what: str) -> None:
        self.on_progress(what, min(self.done, self.total), self.total)
        self.done += 1


class _ModelRow:
    """A row of the chart: one model on all cards. Presets and larger requests are of single cards."""

    def __init__(
        self,
        name: str,
        usual: Request,
        columns: Sequence[ChartedCard],
        known: Mapping[str, Accelerator],
        ram: int | None,
        sources: Sources,
        progress: _Progress,
    ) -> None:
        self._name, self._usual, self._columns, self._known = name, usual, columns, known
        self._ram, self._sources, self._progress = ram, sources, progress
        self._footprint = self._measured(usual)
        self.model = ChartedModel(name=name, request=usual, presets=tuple(self._presets()))

    def cells(self, *, larger: bool) -> list[Cell]:
        single = [card.name for card in self._columns if card.count == 1]
        largest = find_max_request(self._usual, single, self._fitting, upwards=larger) if single else {}
        return [self._cell(card, largest.get(card.name)) for card in self._columns]

    def _cell(self, column: ChartedCard, largest: Largest | None) -> Cell:
        card = self._known[column.card]
        if column.count == 1:
            return cell_of(self.model, self._footprint, column, card, self._ram, largest)
        self._progress.next(f"{self._name}, {column.title}")
        alone = plan_seconds(self._footprint, card, self._ram)
        return self._sources.several(self.model, self._footprint, column, self._ram, alone)

    def _presets(self) -> Iterator[Preset]:
        for level in LEVELS if any(card.count == 1 for card in self._columns) else ():
            self._progress.next(f"{self._name}, level {level}")
            yield self._sources.preset(self._name, level, self._footprint, ANY_CARD)

    def _fitting(self, request: Request, cards: Collection[str]) -> set[str]:
        footprint = self._footprint if request == self._usual else self._measured(request)
        return {card for card in cards if fits_card(footprint, self._known[card], self._ram)}

    def _measured(self, request: Request) -> Footprint:
        self._progress.next(f"{self._name}, {request.described}")
        return self._sources.footprint(self._name, request)


def _measured(model: str, request: Request) -> Footprint:
    from tightfit.run.footprints import measure_footprint

    return measure_footprint(model, request)


LEVELS = (0, 1, 2, 3)


def simulated_preset(model: str, level: int, footprint: Footprint, accelerator: Accelerator) -> Preset:
    """Simulate `level` of `model` on `accelerator` with unlimited memory; cached. `footprint`: of its usual request."""
    endless = accelerator.model_copy(update={"bytes": 2**60})
    question = {"model": model, "level": level, "card": endless.to_mapping()}
    usual = known_model(model).request
    return cached(Preset, question, lambda: _simulated(model, level, footprint, endless, usual))


def _simulated(model: str, level: int, footprint: Footprint, accelerator: Accelerator, request: Request) -> Preset:
    from tightfit.run.simulate import SimulationRun
    from tightfit.run.unlimited_cards import unlimited_card
    from tightfit.simulator.allocator_replay import least_capacity

    with unlimited_card(accelerator) as card:
        simulation = SimulationRun(model, card, {"level": level}, request)
        simulation.run()
        plan, trace = simulation.fitted.plan, simulation.fitted.report().trace
        return Preset(
            level=level,
            needed_bytes=least_capacity(card.allocator.history, expandable=plan.expandable_segments),
            host_bytes=host_bytes(plan, footprint),
            seconds=trace.seconds if accelerator.memory_rate else None,
        )


TEXTS, PICTURES = (".md", ".json"), (".png", ".svg")


def check_out(out: Path, *, levels: bool) -> None:
    """Raise InputError if a chart, or with `levels` a level table, cannot be written to `out`."""
    from tightfit.run.files import check_writable

    kinds = TEXTS if levels else (*PICTURES, *TEXTS)
    if out.suffix.lower() not in kinds:
        what = "a level table" if levels else "a chart"
        raise InputError(f"--out {out}: {what} is written as {', '.join(kinds[:-1])} or {kinds[-1]}", out=str(out))
    check_writable(out)


def chart_text(made: Chart | LevelTable) -> str:
    """Return the text for a terminal."""
    return describe_chart(made) if isinstance(made, Chart) else describe_levels(made)


def write_chart(made: Chart | LevelTable, out: Path) -> None:
    """Write `made` to `out`, whose suffix `check_out` has checked."""
    kind = out.suffix.lower()
    with replacing(out) as partial:
        if kind == ".json":
            partial.write_text(made.to_json(indent=2) + "\n")
        elif kind == ".md":
            partial.write_text(as_markdown(made) if isinstance(made, Chart) else levels_as_markdown(made))
        elif isinstance(made, Chart):
            from tightfit.report.heatmap import draw_chart

            draw_chart(made, partial, kind.removeprefix("."))
