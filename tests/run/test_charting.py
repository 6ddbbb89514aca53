"""Charts from names: what is asked of whom, in which order, and that names are those of the catalog."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plan.test_cells import footprint_of
from tightfit.catalog.known import known_card, known_model
from tightfit.cli import app
from tightfit.errors import InputError, ModelError
from tightfit.plan.chart_cells import charted_card
from tightfit.run import charting
from tightfit.run import charting as presets
from tightfit.run import predict as forecasts
from tightfit.run.charting import CARDS, Sources, chart_of, level_table, simulated_preset
from tightfit.run.charting_ranks import rank_cell
from tightfit.run.footprints import measure_footprint
from tightfit.run.limits import Limits
from tightfit.run.models import resolve_model
from tightfit.run.predict_ranks import forecast_ranks
from tightfit.run.rank_layout import RankLayout
from tightfit.run.simulate import simulate_call
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel, LevelTable, Preset
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.request import Request

GIB = 2**30


class Asked:
    """Made-up models: activations grow with the picture."""

    def __init__(self) -> None:
        self.footprints: list[tuple[str, str]] = []
        self.presets: list[tuple[str, int, int]] = []
        self.shared: list[tuple[str, int, int | None]] = []

    def footprint(self, model: str, asked: Request) -> Footprint:
        self.footprints.append((model, asked.described))
        pixels = (asked.height or 0) * (asked.width or 0) * (asked.frames or 1)
        return footprint_of(pixels / 512**2)

    def preset(self, model: str, level: int, footprint: Footprint, accelerator: Accelerator) -> Preset:
        self.presets.append((model, level, accelerator.bytes))
        return Preset(level=level, needed_bytes=(12 - 3 * level) * GIB, host_bytes=level * GIB, seconds=10.0 + level)

    @property
    def sources(self) -> Sources:
        return Sources(self.footprint, self.preset, self.several)

    def several(
        self, model: ChartedModel, footprint: Footprint, column: ChartedCard, ram: int | None, alone: float | None
    ) -> Cell:
        self.shared.append((column.card, column.count, ram))
        speedup = alone and 1.5
        return Cell(
            model=model.name, card=column.name, summary="ring", peak_bytes=GIB, seconds=9, slowdown=1.0, speedup=speedup
        )


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_chart_asks_for_each_size_once_whatever_the_cards(asked: Asked) -> None:
    chart = chart_of(["SD1.5"], ["RTX 4090", "gtx1650", "rtx4060"], sources=asked.sources)
    assert [card.name for card in chart.cards] == ["gtx1650", "rtx4060", "rtx4090"]  # by size
    assert [model.name for model in chart.models] == ["sd-1.5"]
    assert [cell.level for cell in chart.cells] == [3, 2, 0]
    assert len(asked.footprints) == len(set(asked.footprints))
    assert asked.footprints[:2] == [("sd-1.5", "512×512"), ("sd-1.5", "768×768")]
    assert [level for _, level, _ in asked.presets] == [0, 1, 2, 3]
    largest = [cell.largest.request.height for cell in chart.cells if cell.largest]
    assert largest == sorted(largest)
    assert Chart.from_text(chart.to_json()) == chart


def test_several_cards_come_after_single_ones_and_say_how_much_faster_they_are(asked: Asked) -> None:
    chart = chart_of(["sdxl"], ["4 x RTX 4090", "rtx4090", "2xgtx1650", "2×rtx4090"], 5 * GIB, sources=asked.sources)
    assert [card.name for card in chart.cards] == ["rtx4090", "2xgtx1650", "2xrtx4090", "4xrtx4090"]
    assert asked.shared == [("gtx1650", 2, 5 * GIB), ("rtx4090", 2, 5 * GIB), ("rtx4090", 4, 5 * GIB)]
    assert [cell.speedup for cell in chart.cells[2:]] == [1.5, 1.5]


def test_presets_and_larger_sizes_are_of_single_cards(asked: Asked) -> None:
    chart = chart_of(["sd-1.5"], ["2xrtx4090"], sources=asked.sources)
    assert (asked.presets, len(asked.footprints), len(chart.cells)) == ([], 1, 1)


def test_a_call_on_two_cards_is_predicted_as_plan_does() -> None:
    model = ChartedModel(name="sd-1.5", request=known_model("sd-1.5").request)
    column = charted_card("rtx4090", known_card("rtx4090"), 2)
    footprint = measure_footprint("sd-1.5")
    cell = rank_cell(model, footprint, column, None, 3.0)
    found = forecast_ranks(
        "sd-1.5", "rtx4090", RankLayout(2), {}, model.request, lambda _: contextlib.nullcontext(), Limits(None)
    )
    assert (cell.seconds, cell.card) == (found.trace.seconds, "2xrtx4090")
    assert cell.speedup == 3.0 / found.trace.seconds
    assert cell.slowdown == 1
    assert cell.summary == "two groups; all on the card"
    small = column.model_copy(update={"usable_bytes": 2**28})
    assert "needs" in rank_cell(model, footprint, small, 2**20, None).summary


def test_nothing_larger_is_tried_where_nobody_wants_that(asked: Asked) -> None:
    told: list[tuple[str, int, int]] = []
    names = ["gtx1650", "rtx4090"]
    chart = chart_of(
        ["sd-1.5"], names, usual_only=True, on_progress=lambda *step: told.append(step), sources=asked.sources
    )
    assert [size for _, size in asked.footprints] == ["512×512"]
    assert [cell.largest.limit for cell in chart.cells if cell.largest] == ["ladder"] * 2
    assert told[-1] == ("", 5, 5)


def test_without_names_it_is_all_models_on_a_card_of_each_size() -> None:
    sizes = [known_card(name).bytes // GIB for name in CARDS]
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (4, 80)


def test_progress_goes_forward_to_its_end(asked: Asked) -> None:
    told: list[tuple[str, int, int]] = []
    chart_of(["sd-1.5", "sdxl"], ["rtx4090"], on_progress=lambda *step: told.append(step), sources=asked.sources)
    done = [step[1] for step in told]
    assert done == sorted(done)
    assert told[0] == ("sd-1.5, 512×512", 0, told[0][2])
    assert told[-1][1] == told[-1][2]


@pytest.mark.parametrize(
    ("models", "cards", "message"),
    [
        (["sdx1"], [], "unknown model in the catalog 'sdx1': did you mean 'sdxl'"),
        ([""], [], "unknown model in the catalog ''"),
        (["sdxl"], ["rtx4091"], "unknown card 'rtx4091': did you mean 'rtx4090'"),
        (["sdxl"], ["2xrtx4091"], "unknown card 'rtx4091': did you mean 'rtx4090'"),
        (["sdxl"], ["0xrtx4090"], "0xrtx4090: there are 1 to 1,024 cards of a kind"),
    ],
)
def test_unknown_names_are_refused_before_anything_is_measured(
    asked: Asked, models: list[str], cards: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        chart_of(models, cards, sources=asked.sources)
    assert asked.footprints == []


def test_a_level_table_is_rehearsed_on_its_card(asked: Asked) -> None:
    told: list[tuple[str, int, int]] = []
    table = level_table("wan2.1-14b", ["rtx3060"], on_progress=lambda *step: told.append(step), sources=asked.sources)
    assert (table.model, table.card.name) == ("wan-2.1-14b", "rtx3060")
    assert {size for *_, size in asked.presets} == {12 * GIB}
    assert [row.fits for row in table.rows[:4]] == [False, True, True, True]
    assert [row.speed for row in table.rows[:4]] == [1, 10 / 11, 10 / 12, 10 / 13]
    assert LevelTable.from_text(table.to_json()) == table
    assert told[0] == ("wan-2.1-14b, 1280×720, 81 frames", 0, 5)
    assert told[1:] == [(f"wan-2.1-14b, level {level}", level + 1, 5) for level in range(4)]
    with pytest.raises(InputError, match="a level table is of one card, not of 2: rtx3060, rtx4090"):
        level_table("sdxl", ["rtx3060", "rtx4090"], sources=asked.sources)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 3])
def test_a_preset_needs_what_plan_says(level: int) -> None:
    """A card that has what the preset needs is one on which `tightfit plan --level` fits; with less it does not."""
    small = Request(height=256, width=256, steps=4)
    card = known_card("rtx3060")
    footprint = measure_footprint("sd-1.5", small)
    preset = presets._simulated("sd-1.5", level, footprint, card, small)
    context = 512 * 2**20
    for spare, fits in ((0, True), (-2 * 2**20, False)):
        sized = card.model_copy(update={"bytes": preset.needed_bytes + context + spare})
        told = simulate_call("sd-1.5", sized, {"level": level}, small)
        assert told.fits is fits
    assert preset.seconds == pytest.approx(told.trace.seconds)


def test_presets_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Preset(level=1, needed_bytes=GIB, host_bytes=0)
    calls: list[Any] = []
    monkeypatch.setattr(presets, "_simulated", lambda *args: calls.append(args) or made)
    card = Accelerator(name="any card", kind="simulated", bytes=1)
    assert [simulated_preset("sdxl", 1, footprint_of(), card) for _ in range(2)] == [made, made]
    assert len(calls) == 1
    simulated_preset("sdxl", 1, footprint_of(), known_card("rtx4090"))
    assert len(calls) == 2


# names


def test_plan_takes_names_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def remembered(kind: Any, question: dict[str, Any], answer: Any) -> Any:
        asked.append(question)
        raise InputError("not now, question 1")

    monkeypatch.setattr(forecasts, "cached", remembered)
    CliRunner().invoke(app, ["plan", "Wan2.1 14B", "--card", "RTX 4090", "--level", "3"])
    assert [(question["model"], question["title"], question["card"]) for question in asked] == [
        ("wan-2.1-14b", "wan-2.1-14b", "rtx4090")
    ]


def test_a_folder_goes_before_a_name_that_is_only_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("SDXL") == ("sdxl", "sdxl")
    Path("SDXL").mkdir()
    with pytest.raises(ModelError, match="SDXL is no model"):
        resolve_model("SDXL")
    Path("sdxl").mkdir(exist_ok=True)
    assert resolve_model("sdxl") == ("sdxl", "sdxl")  # the catalog's own name


# the command


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Asked) -> Iterator[None]:
    monkeypatch.setattr(charting, "_measured", asked.footprint)
    monkeypatch.setattr(charting, "simulated_preset", asked.preset)
    monkeypatch.chdir(tmp_path)
    return


def tightfit_(*words: str) -> Any:
    return CliRunner().invoke(app, ["chart", *words])


WORDS = ("--models", "sdxl, sd1.5", "--cards", "rtx4060,rtx4090")


@pytest.mark.usefixtures("_made_up")
def test_the_command_says_writes_and_prints_json() -> None:
    result = tightfit_(*WORDS, "--out", "chart.md", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "sdxl: 1024×1024, 50 steps" in result.stdout
    assert "wrote chart.md\n" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    chart = Chart.from_text(result.stdout.splitlines()[-1])
    assert [model.name for model in chart.models] == ["sdxl", "sd-1.5"]
    assert Path("chart.md").read_text().startswith("|  | rtx4060<br>8 GiB | rtx4090<br>24 GiB |")


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(("name", "start"), [("c.json", b"{"), ("c.PNG", b"\x89PNG"), ("c.svg", b"<?xml")])
def test_the_suffix_says_what_is_written(name: str, start: bytes) -> None:
    assert tightfit_(*WORDS, "--out", name).exit_code == 0
    assert Path(name).read_bytes().startswith(start)
    assert [path.name for path in Path().iterdir()] == [name]
    if name == "c.json":
        assert len(Chart.from_text(Path(name).read_text()).cells) == 4


@pytest.mark.usefixtures("_made_up")
def test_the_command_makes_a_level_table() -> None:
    result = tightfit_("--level-table", "wan2.1-14b", "--cards", "rtx4090", "--out", "levels.md", "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wan-2.1-14b: 1280×720, 81 frames, 50 steps; on rtx4090")
    assert len(json.loads(result.stdout.splitlines()[-1])["rows"]) >= 4
    assert Path("levels.md").read_text().count("\n| ") == 6


@pytest.mark.usefixtures("_made_up")
def test_a_limit_of_ram_goes_into_the_chart() -> None:
    result = tightfit_("--models", "sd-1.5", "--cards", "rtx4060", "--ram", "1GB", "--json")
    assert Chart.from_text(result.stdout.splitlines()[-1]).ram == 10**9


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "sdx1"), "unknown model in the catalog 'sdx1': did you mean 'sdxl'?"),
        (("--cards", "4090"), "unknown card '4090': did you mean 'rtx4090'?"),
        (("--ram", "much"), "'much' is not a size: write it like 8GB"),
        (("--out", "chart.jpg"), "--out chart.jpg: a chart is written as .png, .svg, .md or .json"),
        (("--out", "chart"), "--out chart: a chart is written as .png, .svg, .md or .json"),
        (("--out", "missing/chart.md"), "cannot write missing/chart.md: No such file or directory"),
        (("--level-table", "sdxl", "--out", "t.png"), "--out t.png: a level table is written as .md or .json"),
        (("--level-table", "sdxl", "--models", "sdxl"), "--level-table sdxl is of one model: leave out --models sdxl"),
        (("--level-table", "sdxl", "--cards", "h100,t4"), "a level table is of one card, not of 2: h100, t4"),
        (("--level-table", "wan"), "unknown model in the catalog 'wan'"),
    ],
)
def test_wrong_words_are_one_line(asked: Asked, words: tuple[str, ...], message: str) -> None:
    result = tightfit_(*words, "--json")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"tightfit: {message}")
    assert json.loads(result.stdout)["error"]["type"] == "InputError"
    assert asked.footprints == []
    assert list(Path().iterdir()) == []
