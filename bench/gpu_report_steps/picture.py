"""Recorded steps → one picture: rates, kernels, peaks and times beside the predicted ones, and calls within caps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_report_steps.records import Row

__all__ = ["draw"]

Pairs = list[tuple[str, float, float]]  # a label, what was measured, what was predicted


def draw(records: Mapping[str, Row], file: Path, *, dry: bool) -> bool:
    """Write the picture, if there is anything to show; return whether."""
    rates, kernels, calls, caps = _rates(records), _kernels(records), _calls(records), _caps(records)
    if not (rates or kernels or calls or caps):
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    panels: Any = figure.subplots(2, 2)
    title = "The stub's card: times and rates mean nothing" if dry else _card(records)
    figure.suptitle(title)
    _ratios(panels[0, 0], "rates: measured ÷ catalog", rates)
    _ratios(panels[0, 1], "seconds of kernels: measured ÷ clock", kernels)
    _ratios(panels[1, 0], "a call: measured ÷ predicted", calls)
    _bars(panels[1, 1], "seconds of a call within a cap", caps)
    figure.savefig(file, dpi=110)
    return True


def _card(records: Mapping[str, Row]) -> str:
    rows = records.get("versions", {}).get("rows", [])
    return f"{rows[0]['card']}, torch {rows[0]['torch']}" if rows else "a card"


def _rates(records: Mapping[str, Row]) -> Pairs:
    rows = records.get("rates", {}).get("rows", [])
    return [(row["rate"], row["measured"], row["clock"]) for row in rows if row.get("clock") and row.get("measured")]


def _kernels(records: Mapping[str, Row]) -> Pairs:
    rows = records.get("clock", {}).get("rows", [])
    return [(row["kernel"], row["seconds"], row["clock"]) for row in rows if row.get("seconds") and row.get("clock")]


def _calls(records: Mapping[str, Row]) -> Pairs:
    rows = [row for name, record in records.items() if name.startswith("peaks ") for row in record.get("rows", [])]
    return [(f"{row['model']}, {key}", *row[key]) for row in rows for key in ("reserved", "seconds")]


def _caps(records: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Seconds by model and cap, then by contender."""
    found: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        if name.startswith(("caps ", "rivals ")):
            for row in record.get("rows", []):
                if row.get("call"):
                    found.setdefault(f"{row['model']}, {row['cap']} GB", {})[row["contender"]] = row["call"]
    return found


def _ratios(panel: Any, title: str, pairs: Pairs) -> None:
    """Bars of measured over predicted; 1 is as predicted."""
    panel.set_title(title, fontsize=10)
    if not pairs:
        panel.text(0.5, 0.5, "not measured", ha="center", va="center")
        panel.set_axis_off()
        return
    labels = [label for label, _, _ in pairs]
    # from 1 on, because a logarithmic axis has no zero for bars to begin at
    panel.barh(labels, [measured / predicted - 1 for _, measured, predicted in pairs], left=1, color="#4878a8")
    panel.axvline(1, color="black", linewidth=1)
    panel.set_xscale("log")
    panel.invert_yaxis()
    panel.tick_params(labelsize=7)


def _bars(panel: Any, title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    panel.set_title(title, fontsize=10)
    contenders = list(dict.fromkeys(name for row in found.values() for name in row))
    if not contenders:
        panel.text(0.5, 0.5, "not measured", ha="center", va="center")
        panel.set_axis_off()
        return
    for place, name in enumerate(contenders):
        _contender(panel, name, [row.get(name) for row in found.values()], place / (len(contenders) + 1))
    panel.set_xticks([number + 0.4 for number in range(len(found))], list(found), rotation=60, ha="right", fontsize=7)
    panel.set_yscale("log")
    panel.legend(fontsize=7)


def _contender(panel: Any, name: str, seconds: Sequence[float | None], offset: float) -> None:
    places = [number + offset for number, each in enumerate(seconds) if each]
    panel.bar(places, [each for each in seconds if each], width=0.12, label=name)
