"""The nouns of a chart: what models do on cards, and what the presets 0–3 of one model need. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from tightfit.schema.base import Count, Positive, Real, Record
from tightfit.schema.footprint import Request

__all__ = ["Cell", "Chart", "ChartedCard", "ChartedModel", "Largest", "LevelRow", "LevelTable", "Preset"]

Level = Annotated[int, Strict(), Field(ge=0, le=3)]
Limit = Literal["card", "ladder", "model"]


class Preset(Record):
    """One of the levels 0–3, as it was rehearsed for a model's usual request on a card without end."""

    level: Level
    needed_bytes: Positive  # that a card must have for it, caches given back where that helps
    host_bytes: Count  # of weights that wait in RAM
    seconds: Real | None = None  # on that card; None: it has no speed


class Largest(Record):
    """The largest request of a ladder that fits a card losslessly."""

    request: Request
    limit: Limit  # what keeps it from being larger: the card; "model": takes no more; "ladder": nothing larger tried
    refusal: str | None = None  # the model's own words


class Cell(Record):
    """What one model does on one card, for its usual request, under the plan that is made for that card."""

    model: str
    card: str
    level: Level | None = None  # the lowest preset that fits; None: none does
    words: str  # the plan in a few words; of what is refused, what would do
    peak_bytes: Count | None = None  # None: refused, no lossless plan fits
    seconds: Real | None = None
    slowdown: Real | None = None  # times as long as with a card of the same speed and memory without end
    largest: Largest | None = None  # None: not even the smallest that was tried


class ChartedModel(Record):
    """A row of the chart."""

    name: str
    request: Request
    presets: tuple[Preset, ...] = ()


class ChartedCard(Record):
    """A column of the chart."""

    name: str
    title: str
    bytes: Positive
    room: Positive  # of these, what a plan may use


class Chart(Record):
    """Models by cards. Where `ram` is None, there is as much as is wanted."""

    cards: tuple[ChartedCard, ...]
    models: tuple[ChartedModel, ...]
    cells: tuple[Cell, ...]
    ram: Positive | None = None

    def cell(self, model: str, card: str) -> Cell | None:
        """What `model` does on `card`, if that is known."""
        return next((cell for cell in self.cells if (cell.model, cell.card) == (model, card)), None)


class LevelRow(Record):
    """One way to run a model on a card."""

    level: Level | None  # None: the plan that is made for the card
    needed_bytes: Positive  # that the card must have for it
    seconds: Real
    speed: Real  # to level 0 on this card with memory enough: 0.5 is half as fast
    denoiser: str  # what of it is on the device while it works
    encoders: str
    autoencoder: str
    lossy: tuple[str, ...] = ()
    fits: bool


class LevelTable(Record):
    """Levels 0–3 of one model on one card, and what is made for that card where anything fits."""

    model: str
    request: Request
    card: ChartedCard
    rows: tuple[LevelRow, ...]
