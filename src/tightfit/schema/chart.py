"""Records of a chart: results of models on cards, and the needs of one model's presets 0–3. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from tightfit.schema.base import Count, Positive, Real, Record
from tightfit.schema.request import Request

__all__ = ["Cell", "Chart", "ChartedCard", "ChartedModel", "Largest", "LevelRow", "LevelTable", "Preset"]

Level = Annotated[int, Strict(), Field(ge=0, le=3)]
Limit = Literal["card", "ladder", "model"]


class Preset(Record):
    """One of the levels 0–3, simulated for a model's usual request on a card of unlimited memory."""

    level: Level
    needed_bytes: Positive  # least bytes that a card must have; the allocator may release its cache where that helps
    host_bytes: Count  # bytes of weights offloaded to RAM
    seconds: Real | None = None  # time on that card; None: the card has no rates


class Largest(Record):
    """The largest request of an increasing series that fits a card losslessly."""

    request: Request
    limit: Limit  # why it is not larger: "card": memory; "model": rejected by the model; "ladder": end of the series
    refusal: str | None = None  # the model's error message


class Cell(Record):
    """Result of one model on one column's cards, for its usual request, under the plan made for them."""

    model: str
    card: str
    level: Level | None = None  # the lowest preset that fits one card; None: none does
    summary: str  # summary of the plan; if no plan fits, what would be enough
    peak_bytes: Count | None = None  # of each card; None: no lossless plan fits
    seconds: Real | None = None
    slowdown: Real | None = None  # time relative to cards of the same speed with unlimited memory
    speedup: Real | None = None  # of several cards: how many times as fast as one; None: one card, or one cannot
    largest: Largest | None = None  # None: even the smallest request tried does not fit; of several, none is tried


class ChartedModel(Record):
    """A row of the chart: a model, its usual request, and its presets."""

    name: str
    request: Request
    presets: tuple[Preset, ...] = ()


class ChartedCard(Record):
    """A column of the chart: a card, or several of a kind in one computer, and the memory of each in bytes."""

    name: str  # e.g. "rtx4090", or "2xrtx4090"
    title: str
    bytes: Positive
    usable_bytes: Positive  # bytes of these that a plan may use
    count: Positive = 1  # cards, which share the rows of each call

    @property
    def card(self) -> str:
        """The name of one of the cards."""
        return self.name if self.count == 1 else self.name.partition("x")[2]


class Chart(Record):
    """Results of models by cards. If `ram` (bytes) is None, host memory is unlimited."""

    cards: tuple[ChartedCard, ...]
    models: tuple[ChartedModel, ...]
    cells: tuple[Cell, ...]
    ram: Positive | None = None

    def cell(self, model: str, card: str) -> Cell | None:
        """Return the result of `model` on `card`; None if there is none."""
        return next((cell for cell in self.cells if (cell.model, cell.card) == (model, card)), None)


class LevelRow(Record):
    """One row of a LevelTable: a preset, or the plan made for the card."""

    level: Level | None  # None: the plan made for the card
    needed_bytes: Positive  # bytes that the card must have
    seconds: Real
    speed: Real  # relative to level 0 on this card with enough memory: 0.5 is half as fast
    denoiser: str  # bytes of its weights on the device while it runs, and for how long; so the next two
    encoders: str
    autoencoder: str
    lossy: tuple[str, ...] = ()
    fits: bool


class LevelTable(Record):
    """Levels 0–3 of one model on one card, and the plan made for that card if any fits."""

    model: str
    request: Request
    card: ChartedCard
    rows: tuple[LevelRow, ...]
