"""A chart's records: to text and back, and what they look up."""

from __future__ import annotations

import pytest

from tightfit.errors import PlanError
from tightfit.schema import chart
from tightfit.schema.base import Record
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel, Largest, LevelRow, LevelTable, Preset
from tightfit.schema.request import Request

GIB = 2**30
REQUEST = Request(height=480, width=720, frames=49, steps=50, guidance=6.0)
PRESET = Preset(level=3, needed_bytes=5 * GIB, host_bytes=3 * GIB, seconds=2.5)
LARGEST = Largest(request=REQUEST, limit="model", refusal="no more than 49")
CELL = Cell(
    model="cogvideox-2b", card="rtx4060", level=3, summary="streams denoiser 12 %", peak_bytes=7 * GIB, seconds=61.5,
    slowdown=1.02, largest=LARGEST,
)  # fmt: skip
FASTER = CELL.model_copy(update={"card": "2xrtx4060", "level": None, "speedup": 1.9, "largest": None})
REFUSED = Cell(model="cogvideox-2b", card="gtx1650", summary="needs 3.2 GiB")
MODEL = ChartedModel(name="cogvideox-2b", request=REQUEST, presets=(PRESET,))
CARD = ChartedCard(name="rtx4060", title="GeForce RTX 4060", bytes=8 * GIB, usable_bytes=7 * GIB)
TWO = ChartedCard(name="2xrtx4060", title="2 × GeForce RTX 4060", bytes=8 * GIB, usable_bytes=7 * GIB, count=2)
CHART = Chart(cards=(CARD,), models=(MODEL,), cells=(CELL, REFUSED), ram=16 * GIB)
ROW = LevelRow(
    level=2, needed_bytes=9 * GIB, seconds=70.0, speed=0.9, denoiser="3 GiB, resident",
    encoders="8 GiB, while running", autoencoder="400 MiB, resident; tiles of 512 px",
    lossy=("blended-tiling: …",), fits=False,
)  # fmt: skip
TABLE = LevelTable(model="cogvideox-2b", request=REQUEST, card=CARD, rows=(ROW,))
EXAMPLES = [PRESET, LARGEST, CELL, FASTER, REFUSED, MODEL, CARD, TWO, CHART, ROW, TABLE]


def test_there_is_an_example_of_each_record() -> None:
    kinds = {kind for name, kind in vars(chart).items() if name in chart.__all__}
    assert {type(record) for record in EXAMPLES} == kinds


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_round_trip(record: Record) -> None:
    assert type(record).from_text(record.to_json()) == record
    assert type(record).from_text(record.to_yaml()) == record
    assert type(record).from_mapping(record.to_mapping()) == record


def test_cells_are_looked_up_by_model_and_card() -> None:
    assert CHART.cell("cogvideox-2b", "rtx4060") is CHART.cells[0]
    assert CHART.cell("cogvideox-2b", "rtx4090") is None
    assert CHART.cell("sdxl", "rtx4060") is None


def test_several_cards_have_the_name_of_one() -> None:
    assert CARD.card == TWO.card == "rtx4060"


def test_a_level_is_one_of_four() -> None:
    with pytest.raises(PlanError, match="level must be less than or equal to 3, not 4"):
        PRESET.from_mapping(PRESET.to_mapping() | {"level": 4})
