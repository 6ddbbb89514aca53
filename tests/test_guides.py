"""The guides say what bench/results says: generated anew they are the same, and no number is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from make_guides import GUIDES, ROOT, WORDS, facts, fill, pages, the_chart
from tightfit.catalog.known import card_names, model_names
from tightfit.report.heatmap import _compose
from tightfit.schema.chart import Chart, LevelTable

PLACEHOLDER = r"\{\{ .+? \}\}"
# digits that are no numbers: names of levels, techniques, models and cards
NAMES = ["fp8", "int8", "--level 3", "cuda:0", "cuda:1", *model_names(), *card_names()]

guides = pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)


def test_there_is_a_guide_for_each_question() -> None:
    names = {"which-budget", "reading-a-plan", "when-it-does-not-fit", "when-not-to-offload", "chart", "budgets"}
    names |= {"several-cards", "beside-others"}
    assert {guide.stem for guide in GUIDES} == names


@guides
def test_generating_a_page_anew_changes_nothing(guide: Path) -> None:
    page = ROOT / "docs" / guide.name
    assert page.read_text() == pages()[page], f"{page.name} is stale: run tools/make_guides.py"


@guides
def test_every_number_is_generated(guide: Path) -> None:
    prose = re.sub(PLACEHOLDER, "", guide.read_text())
    prose = re.sub(r"^\d\. ", "", prose, flags=re.MULTILINE)  # steps in order
    for name in NAMES:
        prose = prose.replace(name, "")
    assert not re.findall(r".{0,30}\d.{0,30}", prose)


@guides
def test_nothing_is_left_to_fill_in(guide: Path) -> None:
    assert "{{" not in fill(guide.read_text())
    assert "}}" not in fill(guide.read_text())


@guides
def test_links_lead_somewhere(guide: Path) -> None:
    page = ROOT / "docs" / guide.name
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", guide.read_text()):
        file = page.parent / target[0] if target[0] else page
        assert file.exists(), f"{page.name}: no {target[0]}"
        if target[1]:
            headings = [
                re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in file.read_text().splitlines()
                if line.startswith("#")
            ]
            assert target[1][1:] in headings, f"{page.name}: no heading {target[1]} in {target[0]}"


def test_every_word_is_used() -> None:
    used = {match.split()[0] for guide in GUIDES for match in re.findall(r"\{\{ (.+?) \}\}", guide.read_text())}
    assert used == set(WORDS)


def test_the_data_are_a_chart_and_level_tables() -> None:
    chart = the_chart()
    assert Chart.from_text(chart.to_json()) == chart
    assert {cell.model for cell in chart.cells} == {model.name for model in chart.models}
    sizes = [card.bytes // 2**30 for card in chart.cards]
    assert (min(sizes), max(sizes)) == (4, 80)
    assert len(sizes) >= 8
    assert all(LevelTable.from_mapping(each).rows for each in facts()["levels"])
    assert set(chart.cards) >= set(Chart.from_mapping(facts()["with_ram"]).cards)


def test_the_picture_is_of_this_chart() -> None:
    with Image.open(ROOT / "docs/chart.png") as picture:
        wide, high = (int(140 * inches) for inches in _compose(the_chart()).get_size_inches())
        assert abs(picture.width - wide) <= 1
        assert abs(picture.height - high) <= 1
        assert len(picture.convert("RGB").getcolors(10**6) or ()) > 50
