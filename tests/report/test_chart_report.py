"""A chart as text, Markdown and picture: nothing is lost, lines stay short, the picture says what a cell says."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from tightfit.report.chart import SEVERAL, as_markdown, describe_chart, describe_levels, levels_as_markdown
from tightfit.report.heatmap import STEPS, _compose, draw_chart
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel, Largest, LevelRow, LevelTable
from tightfit.schema.request import Request

GIB = 2**30
PICTURE = Request(height=1024, width=1024, steps=28)
CLIP = Request(height=480, width=720, frames=49, steps=50)
SMALL, MIDDLE, BIG = (
    ChartedCard(name=name, title=name, bytes=size * GIB, usable_bytes=size * GIB * 9 // 10)
    for name, size in (("gtx1650", 4), ("rtx4060", 8), ("rtx6000-ada", 48))
)
WORDS = "streams encoders 98 %, denoiser 6 %, VAE 5 %; strips, maps in RAM"
CELLS = (
    Cell(
        model="flux.1-dev", card="gtx1650", summary=WORDS, peak_bytes=3 * GIB, seconds=1200.0, slowdown=2.5,
        largest=Largest(request=PICTURE, limit="card"),
    ),
    Cell(
        model="flux.1-dev", card="rtx4060", level=3, summary=WORDS, peak_bytes=7 * GIB, seconds=126.0, slowdown=1.004,
        largest=Largest(request=PICTURE.model_copy(update={"height": 4096, "width": 4096}), limit="ladder"),
    ),
    Cell(
        model="flux.1-dev", card="rtx6000-ada", level=0, summary="all on the card", peak_bytes=34 * GIB, seconds=14.1,
        slowdown=1.0, largest=Largest(request=PICTURE, limit="model", refusal="at most 1024"),
    ),
    Cell(model="cogvideox-2b", card="gtx1650", summary="needs 5.1 GiB"),
    Cell(
        model="cogvideox-2b", card="rtx4060", level=3, summary="needs 8.2 GiB",
        largest=Largest(request=CLIP.model_copy(update={"frames": 25}), limit="card"),
    ),
)  # fmt: skip
MODELS = (ChartedModel(name="flux.1-dev", request=PICTURE), ChartedModel(name="cogvideox-2b", request=CLIP))
CHART = Chart(cards=(SMALL, MIDDLE, BIG), models=MODELS, cells=CELLS)
ROWS = tuple(
    LevelRow(
        level=level, needed_bytes=GIB, seconds=10.0, speed=0.5, denoiser="1.2 GiB of 22.2 GiB, streamed",
        encoders="9.1 GiB, while running", autoencoder="160 MiB, while running; tiles of 512 px",
        lossy=("blended-tiling: …",) if level else (), fits=level == 3,
    )
    for level in (0, 3, None)
)  # fmt: skip
TABLE = LevelTable(model="flux.1-dev", request=PICTURE, card=MIDDLE, rows=ROWS)


def words_of(line: str) -> str:
    return " ".join(line.split())


def test_text_has_a_row_for_each_cell() -> None:
    lines = [words_of(line) for line in describe_chart(CHART).splitlines()]
    assert "flux.1-dev: 1024×1024, 28 steps" in lines
    assert any(line.startswith("gtx1650 4 GiB – 3 GiB 20 min 00 s 2.50 × 1024×1024 streams") for line in lines)
    assert any(line.startswith("rtx4060 8 GiB 3 7 GiB 2 min 06 s 1.00 × 4096×4096+ streams") for line in lines)
    assert "rtx6000-ada 48 GiB 0 34 GiB 14.1 s 1.00 × 1024×1024* all on the card" in lines
    assert "gtx1650 4 GiB – – refused – – needs 5.1 GiB" in lines
    assert "rtx4060 8 GiB 3 – refused – 25 frames needs 8.2 GiB" in lines
    assert sum(line.startswith("rtx6000-ada") for line in lines) == 1  # what is not known has no row


def test_text_stays_within_100_columns_and_loses_no_word() -> None:
    text = describe_chart(CHART)
    assert max(map(len, text.splitlines())) <= 100
    streamed = text.split("gtx1650")[1].split("rtx4060")[0]
    assert all(word in streamed for word in WORDS.split())
    assert max(map(len, describe_levels(TABLE).splitlines())) <= 100


@pytest.mark.parametrize(("ram", "said"), [(None, "RAM: taken to be as much"), (16 * GIB, "RAM: 16 GiB for")])
def test_what_is_assumed_of_ram_is_said(ram: int | None, said: str) -> None:
    chart = CHART.model_copy(update={"ram": ram})
    assert said in describe_chart(chart)
    assert said in as_markdown(chart)
    assert said in words_of(" ".join(texts_of(_compose(chart))))


def test_markdown_has_all_in_one_table_and_one_for_each_model() -> None:
    text = as_markdown(CHART)
    assert "|  | gtx1650<br>4 GiB | rtx4060<br>8 GiB | rtx6000-ada<br>48 GiB |" in text
    assert "| flux.1-dev | **–** 20 min 00 s | **3** 2 min 06 s | **0** 14.1 s |" in text
    assert "| cogvideox-2b | **–** refused | **3** refused |  |" in text
    assert f"| rtx4060 8 GiB | 3 | 7 GiB | 2 min 06 s | 1.00 × | 4096×4096+ | {WORDS} |" in text
    assert "Beyond that it says: “at most 1024”" in text
    assert text.endswith("|\n")


def test_several_cards_say_how_much_faster_they_are() -> None:
    two = CHART.cards[0].model_copy(update={"name": f"2x{CHART.cards[0].name}", "count": 2})
    fits = next(cell for cell in CHART.cells if cell.seconds).model_copy(update={"card": two.name, "level": None})
    faster, alone = (model.name for model in CHART.models[:2])
    cells = [fits.model_copy(update={"model": faster, "speedup": 1.86}), fits.model_copy(update={"model": alone})]
    chart = CHART.model_copy(update={"cards": (*CHART.cards, two), "cells": (*CHART.cells, *cells)})
    assert "1.86 × as fast as one; " in describe_chart(chart)
    assert f"| 1.86 × as fast as one; {fits.summary} |" in as_markdown(chart)
    assert SEVERAL in as_markdown(chart)
    assert SEVERAL not in as_markdown(CHART)
    said = texts_of(_compose(chart))
    assert {"1.86 × as fast", "one is too small"} <= set(said)


def test_levels_say_what_is_on_the_card() -> None:
    text = describe_levels(TABLE)
    assert text.startswith("flux.1-dev: 1024×1024, 28 steps; on rtx4060, of which 7.2 GiB of 8 GiB may be used")
    rows = [words_of(line) for line in text.splitlines()]
    assert "level 0 1 GiB no 10 s 0.50 ×" in rows
    assert "level 3 (lossy) 1 GiB yes 10 s 0.50 ×" in rows
    assert "made for the card 1 GiB no 10 s 0.50 ×" in rows
    assert (
        words_of(text).count("denoiser 1.2 GiB of 22.2 GiB, streamed; encoders 9.1 GiB, while running; VAE 160 MiB")
        == 3
    )
    assert "| level 0 | 1 GiB | no | 10 s | 0.50 × | 1.2 GiB of 22.2 GiB, streamed |" in levels_as_markdown(TABLE)


# the picture


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_the_picture_says_what_the_cells_say() -> None:
    said = texts_of(_compose(CHART))
    assert {"flux.1-dev", "cogvideox-2b", "gtx1650", "4 GiB", "20 min 00 s", "2 min 06 s", "7 GiB", "own plan"} <= set(
        said
    )
    assert said.count("level 3") == 1
    assert "level 3, lossy" in said
    assert said.count("does not fit") == 3  # two cells and the legend
    assert {"needs 5.1 GiB", "needs 8.2 GiB"} <= set(said)


def test_cells_are_coloured_by_what_little_memory_costs() -> None:
    (axes,) = _compose(CHART).axes
    whole = [box for box in axes.patches if isinstance(box, Rectangle) and box.get_height() > 0.9]
    colours = {(round(box.get_x()), round(box.get_y())): box.get_facecolor() for box in whole}
    assert len(colours) == len(CELLS)
    hatched = [box for box in axes.patches if box.get_hatch()]
    assert len(hatched) == 2
    figure = Figure()
    known = [Rectangle((0, 0), 1, 1, facecolor=colour, figure=figure).get_facecolor() for _, colour, _ in STEPS]
    assert colours[0, 0] == known[-1]
    assert colours[1, 0] == colours[2, 0] == known[0]


def test_a_band_tells_levels_apart() -> None:
    (axes,) = _compose(CHART).axes
    bands = [box for box in axes.patches if isinstance(box, Rectangle) and box.get_height() < 0.9]
    own, three, zero, refused = [box.get_facecolor() for box in bands]
    assert len({own, three, zero}) == 3
    assert refused == three
    brightness = [sum(colour[:3]) for colour in (own, three, zero)]
    assert brightness == sorted(brightness)  # the darker, the less fits


def test_no_text_runs_into_another_or_out_of_the_picture() -> None:
    figure = _compose(CHART)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text()]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_chart(CHART, tmp_path / "chart.png", "png")
    with Image.open(tmp_path / "chart.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(pixels) > 400_000
    drawn = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(pixels, axis=0)}
    assert {STEPS[0][1], STEPS[-1][1]} <= drawn


def test_the_same_chart_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        draw_chart(CHART, tmp_path / name, "svg")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
