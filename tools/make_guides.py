"""bench/results/chart-simulated.json and tools/guides/*.md → docs/*.md and docs/chart.png: every number in them.

python tools/make_guides.py          # write them
python tools/make_guides.py --check  # exit 1 if that would change a page
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draw_rivals import draw_rivals, draw_rivals_cuda
from make_tables import OURS, all_budgets, read, rivals_by_budget, table
from tightfit.catalog.cuda import CONTEXT, workspace_bytes
from tightfit.catalog.known import card_names, known_card, model_names
from tightfit.plan.planner import SPARE
from tightfit.plan.presets import LEVEL_TILE
from tightfit.report.chart import NONE, as_markdown, card_words, largest_words, levels_as_markdown, numbers
from tightfit.report.heatmap import draw_chart
from tightfit.schema.chart import Cell, Chart, ChartedCard, LevelTable
from tightfit.schema.stores import ORDINARY_DISK
from tightfit.units import format_bytes, format_seconds

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "tools/guides").glob("*.md"))
WORST = 8  # rows of what offloading costs most


@functools.cache
def facts() -> dict[str, Any]:
    return read("chart-simulated")


@functools.cache
def the_chart() -> Chart:
    return Chart.from_mapping(facts()["chart"])


def column(name: str) -> ChartedCard:
    return next(card for card in the_chart().cards if card.name == name)


def chart() -> str:
    return as_markdown(the_chart()).rstrip()


@functools.cache
def on_several_cards() -> Chart:
    return Chart.from_mapping(facts()["several"])


def chart_of_several() -> str:
    """Times, speedups and how, of each model on several cards."""
    made = on_several_cards()
    rows = [
        (model.name, model.request.size, *(_on_several(made.cell(model.name, card.name)) for card in made.cards))
        for model in made.models
    ]
    return table(("", "usual request", *(card.name for card in made.cards)), rows)


def _on_several(cell: Cell | None) -> str:
    if cell is None or cell.seconds is None:
        return "" if cell is None else cell.summary
    faster = "one is too small" if cell.speedup is None else f"**{cell.speedup:.2f} ×**"
    return f"{format_seconds(cell.seconds)}, {faster}, {format_bytes(cell.peak_bytes or 0)}<br>{cell.summary}"


def cards() -> str:
    rows = [(card_words(card), format_bytes(card.usable_bytes)) for card in the_chart().cards]
    return table(("card", "for a plan"), rows)


def card(name: str) -> str:
    """All models on one card."""
    return _cells(the_chart(), name)


def within_ram() -> str:
    made = Chart.from_mapping(facts()["with_ram"])
    return "\n\n".join(f"{card_words(card)}:\n\n{_cells(made, card.name)}" for card in made.cards)


def _cells(made: Chart, name: str) -> str:
    cells = [(model, made.cell(model.name, name)) for model in made.models]
    rows = [(model.name, model.request.size, *numbers(cell), cell.summary) for model, cell in cells if cell]
    return table(("", "usual request", "level", "peak", "time", "slower", "largest", "plan"), rows)


def weights() -> str:
    """What level 3 leaves in RAM: everything."""
    rows = [(model.name, format_bytes(max(p.host_bytes for p in model.presets))) for model in the_chart().models]
    return table(("", "weights"), rows)


def ram() -> str:
    return f"{facts()['with_ram']['ram'] / 10**9:.0f}GB"


def largest() -> str:
    made = the_chart()
    rows = [(model.name, *(_largest(made.cell(model.name, card.name)) for card in made.cards)) for model in made.models]
    head = ("", *(f"{card.name}<br>{format_bytes(card.bytes)}" for card in made.cards))
    return table(head, rows).replace("\n", "\n   ")  # inside of a list


def _largest(cell: Cell | None) -> str:
    return "" if cell is None else largest_words(cell.largest)


def slowest() -> str:
    """The most expensive card of each model."""
    rows = []
    for model in the_chart().models:
        cells = [cell for cell in the_chart().cells if cell.model == model.name and cell.slowdown is not None]
        worst = max(cells, key=lambda cell: cell.slowdown or 0)
        rows.append((model.name, model.request.size, card_words(column(worst.card)), f"{worst.slowdown:.2f} ×"))
    return table(("", "usual request", "card", "slower"), rows)


def offloading() -> str:
    """What a step costs with less memory, where it costs most."""
    steps: dict[tuple[str, str, str], dict[float, float]] = {}
    for row in read("budgets-simulated")["rows"]:
        if "played" in row:
            about = row["model"], row["request"], row["card"]
            steps.setdefault(about, {})[row["share"]] = row["played"]["denoise"]
    shares = sorted({share for by in steps.values() for share in by})
    ratios = {about: {share: by[share] / min(by.values()) for share in by} for about, by in steps.items()}
    worst = sorted(ratios, key=lambda about: -max(ratios[about].values()))
    shown = [*worst[:WORST], *worst[-2:]]
    rows = [(*about, *(_times(ratios[about].get(share)) for share in shares)) for about in shown]
    return table(("", "request", "card", *(f"{share:.0%}" for share in shares)), rows)


def _times(ratio: float | None) -> str:
    return "refused" if ratio is None else f"{ratio:.2f} ×"


def several() -> str:
    """What two cards do beside one, share by share."""
    by: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for row in read("several-simulated")["rows"]:
        by.setdefault((row["model"], row["request"], row["share"]), {})[row["used"]] = row
    rows = []
    for (model, request, share), (one, two) in ((about, both.values()) for about, both in by.items()):
        gain = f"{_call(one) / _call(two):.2f} ×" if "played" in one and "played" in two else ""
        apart = ", ".join(name for name, said in two.get("placements", {}).items() if said.startswith("on "))
        size = f"{share:.0%}: {format_bytes(one['budget'])}"
        rows.append((model, request, size, _taken(one), _taken(two), gain, apart or NONE))
    return table(("", "request", "each card", "one card", "two cards", "faster", "on the other"), rows)


def _call(row: dict[str, Any]) -> float:
    return float(sum(row["played"].values()))


def _taken(row: dict[str, Any]) -> str:
    return "out of memory" if "failed" in row else "too small" if "refused" in row else format_seconds(_call(row))


def rivals() -> str:
    """Everybody's calls within every budget."""
    by_budget = rivals_by_budget()
    budgets = sorted({budget for *_, budget in by_budget})
    names = dict.fromkeys(name for here in by_budget.values() for name in here)
    rows = [
        (*about, name, *(_beside(by_budget[*about, budget], name) for budget in budgets))
        for about in dict.fromkeys((model, asked) for model, asked, _ in by_budget)
        for name in names
    ]
    return table(("", "", "", *(f"{budget / 2**30:g} GiB" for budget in budgets)), rows)


def _beside(here: dict[str, dict[str, Any]], name: str) -> str:
    row, own = here[name], here[OURS]
    if "call" not in row:
        return "refused" if name == OURS else "out of memory"
    if name == OURS or "call" not in own:
        return f"{format_seconds(row['call'])}, {format_bytes(row['peak'])}"
    more = "".join(f", {what}" for what in ("tiles" * bool(row["tiles"]), row.get("chosen", "")) if what)
    return f"{row['call'] / own['call']:.3f} ×, {format_bytes(row['peak'])}{more}"


def rivals_steps() -> str:
    """The requests, with their steps."""
    rows = read("rivals-simulated")["rows"]
    asked = dict.fromkeys((row["model"], row["request"], row["steps"]) for row in rows)
    return "; ".join(f"{model} {request}, {steps} steps" for model, request, steps in asked)


def rivals_versions() -> str:
    facts = read("rivals-simulated")
    versions = facts["machine"] | facts
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "diffusers-mm") if name in versions)


def rivals_cuda() -> str:
    """What was counted in everybody's calls on cards of several sizes; sizes with one result share a line."""
    lines: dict[tuple[object, ...], list[int]] = {}
    for row in read("rivals_cuda")["rows"]:
        about = row["model"], row["request"], row["contender"]
        lines.setdefault((*about, *_counted(row)), []).append(row["cap"] // 2**30)
    rows = [
        (*line[:3], ", ".join(map(str, sorted(caps))), *line[3:])
        for line, caps in sorted(lines.items(), key=lambda line: _cuda_place(line[0], line[1]))
    ]
    head = ("", "", "", "GiB of the card", "runs", "reserved", "to the card", "from the card", "page-locked", "waits")
    return table(head, rows)


def _cuda_place(line: tuple[object, ...], caps: list[int]) -> tuple[int, int, int]:
    rows = read("rivals_cuda")["rows"]
    models, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "contender"))
    return models.index(line[0]), (names.index(line[2]) + 1) * (line[2] != OURS), min(caps)


def _counted(row: dict[str, Any]) -> tuple[str, ...]:
    """One contender on one card, in words."""
    if "to_card" not in row:
        why = f"out of memory ({row['failed']})" if "failed" in row else str(row.get("refused", row.get("error")))
        return why.partition("\n")[0][:120].replace("|", "/"), *[NONE] * 5
    size = {key: format_bytes(row[key]) for key in ("reserved", "to_card", "from_card", "locked")}
    if row["to_card"] and row["to_card_pageable"] > row["to_card"] / 2:
        size["to_card"] += ", pageable"
    said = ", ".join(what for what in ("yes", "tiles" * bool(row["tiles"]), row.get("chosen") or "") if what)
    return said, size["reserved"], size["to_card"], size["from_card"], size["locked"], str(row["waits"])


def rivals_cuda_versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in read("rivals_cuda")["versions"].items())


def workspace(name: str) -> str:
    """What cuBLAS keeps for each thread on this card."""
    return format_bytes(workspace_bytes(known_card(name).compute_capability))


def level_table(which: str) -> LevelTable:
    tables = [LevelTable.from_mapping(each) for each in facts()["levels"]]
    return next(each for each in tables if each.model.startswith(which))


def plan(name: str) -> str:
    asked = facts()["plans"][name]
    return f"```\n$ {asked['command']}\n{asked['said']}\n```"


def plan_exit(name: str) -> str:
    return str(facts()["plans"][name]["exit"])


def plan_command(name: str) -> str:
    return str(facts()["plans"][name]["command"])


def verdict(name: str) -> str:
    """What its first line says after the colon."""
    first: str = facts()["plans"][name]["said"].splitlines()[0]
    return first.partition(": ")[2].partition(";")[0]


def _in_verdict(which: int) -> str:
    found = re.match(r"fits, (\S+ \S+) of (\S+ \S+)$", verdict("fits"))
    if found is None:
        raise ValueError(f"the first line of a plan has changed: {verdict('fits')!r}")
    return found[which]


WORDS: dict[str, Callable[..., str]] = {
    "budgets": all_budgets,
    "card": card,
    "card_count": lambda: str(len(card_names())),
    "cards": cards,
    "chart": chart,
    "chart_of_several": chart_of_several,
    "context": lambda: format_bytes(CONTEXT),
    "disk": lambda: f"{ORDINARY_DISK / 10**9:.0f} GB",
    "fits.capacity": lambda: _in_verdict(2),
    "fits.needed": lambda: _in_verdict(1),
    "half": lambda name: f"{column(name).bytes // 2**31}GB",
    "largest": largest,
    "levels": lambda which: levels_as_markdown(level_table(which)).rstrip(),
    "levels.card": lambda which: level_table(which).card.name,
    "levels.model": lambda which: level_table(which).model,
    "model_count": lambda: str(len(model_names())),
    "none": lambda: NONE,
    "offloading": offloading,
    "plan": plan,
    "plan_command": plan_command,
    "plan_exit": plan_exit,
    "ram": ram,
    "rivals": rivals,
    "rivals.card": lambda: str(read("rivals-simulated")["card"]),
    "rivals.requests": rivals_steps,
    "rivals_cuda": rivals_cuda,
    "rivals_cuda.versions": rivals_cuda_versions,
    "rivals.versions": rivals_versions,
    "share": lambda: f"{1 - SPARE:.0%}",
    "size": lambda name: format_bytes(column(name).bytes),
    "several": several,
    "slowest": slowest,
    "spare": lambda: f"{SPARE:.0%}",
    "tile": lambda: str(LEVEL_TILE),
    "verdict": verdict,
    "weights": weights,
    "within_ram": within_ram,
    "workspace": workspace,
}


def fill(template: str) -> str:
    def word(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return WORDS[name](*arguments)

    return re.sub(r"\{\{ (.+?) \}\}", word, template)


def pages() -> dict[Path, str]:
    """What each page should say."""
    return {ROOT / "docs" / guide.name: fill(guide.read_text()) for guide in GUIDES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text() != text]
    for page in stale:
        if check:
            print(f"{page.relative_to(ROOT)} does not say what bench/results says: run tools/make_guides.py")
        else:
            page.write_text(pages()[page])
    if not check:
        draw_chart(the_chart(), ROOT / "docs/chart.png", "png")
        draw_chart(on_several_cards(), ROOT / "docs/chart-several.png", "png")
        beside = read("rivals-simulated")
        draw_rivals(beside["rows"], beside["card"], ROOT / "docs/beside-others.png")
        draw_rivals_cuda(read("rivals_cuda")["rows"], ROOT / "docs/beside-others-cuda.png")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
