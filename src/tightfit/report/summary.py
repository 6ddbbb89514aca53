"""A Report of one call and its plan, as text, as JSON, or as one line for a log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.schema.plan import TECHNIQUES, Plan
from tightfit.schema.results import PhaseTrace, Trace
from tightfit.units import format_bytes, format_seconds

__all__ = ["MOST_ROWS", "Report", "align", "fold_phases"]

MOST_ROWS = 12  # with more phases, one row per name: a call whose components alternate has hundreds of phases
HEADINGS = ("phase", "seconds", "calls", "peak", "of which weights", "bytes in", "bytes out")


@dataclass(frozen=True, repr=False)
class Report:
    """A plan and the measurements of one call under it. `str(report)` is a summary for people."""

    plan: Plan
    trace: Trace

    @property
    def lossless(self) -> bool:
        """Whether no lossy technique changed values in this call, even if the plan allows some."""
        return not self.trace.lossy

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        trace = self.trace
        return {
            "lossless": self.lossless,
            "measured": {
                "peak_bytes": trace.peak_bytes,
                "seconds": trace.seconds,
                "rss_peak_bytes": trace.rss_peak_bytes,
            },
            "phases": [_phase_mapping(phase) for phase in trace.phases],
            "caches": [cache.to_mapping() for cache in trace.caches],
            "lossy": list(trace.lossy),
            "notes": list(trace.notes),
            "plan": self.plan.to_mapping(),
        }

    def log_line(self) -> str:
        """Return the call as one line of key=value pairs, for the log of a service."""
        trace = self.trace
        slowest = max(trace.phases, key=lambda phase: phase.seconds, default=None)
        pairs = {
            "call": str(trace.call),
            "device": trace.device,
            "level": "custom" if self.plan.level is None else str(self.plan.level),
            "seconds": f"{trace.seconds:.6g}",
            "peak_bytes": str(trace.peak_bytes),
            "rss_peak_bytes": str(trace.rss_peak_bytes),
            "lossless": str(self.lossless).lower(),
            "slowest_phase": slowest.name if slowest else "none",
        }
        return " ".join(f"{key}={_log_value(value)}" for key, value in pairs.items())

    def __str__(self) -> str:
        lines = [self._headline(), "", *_table(self.trace.phases), "", self._quality(), *self._budget()]
        lines += [f"step cache: {cache.described}" for cache in self.trace.caches]
        lines += [f"note: {_one_line(note)}" for note in self.trace.notes]
        lines += [f"because: {_one_line(f'{why.decision}: {why.because}')}" for why in self.plan.reasons]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Report of {self.trace}>"

    def _headline(self) -> str:
        rss = self.trace.rss_peak_bytes
        return f"{self.trace}{f', RAM peak {format_bytes(rss)}' if rss else ''}"

    def _quality(self) -> str:
        if self.trace.lossy:
            return "lossy: " + "; ".join(_technique(name) for name in self.trace.lossy)
        if self.plan.lossy:
            return f"lossless: what the plan allows changed nothing in this call ({'; '.join(self.plan.lossy)})"
        return "lossless"

    def _budget(self) -> list[str]:
        budget, rss = self.plan.budget, self.trace.rss_peak_bytes
        if budget is None:
            return []
        lines = [_against("device budget", self.trace.peak_bytes, budget.device)] if budget.device else []
        lines += [_against(f"budget of {name}", self._peak_on(name), size) for name, size in budget.devices.items()]
        return lines + ([_against("RAM budget", rss, budget.ram)] if budget.ram and rss else [])

    def _peak_on(self, name: str) -> int:
        if name == self.plan.device:
            return self.trace.peak_bytes
        return max((phase.other_devices.get(name, 0) for phase in self.trace.phases), default=0)


def fold_phases(phases: Iterable[PhaseTrace]) -> tuple[PhaseTrace, ...]:
    """Merge phases by name, in order of first appearance: times, bytes and runs are summed, peaks the highest."""
    by_name: dict[str, list[PhaseTrace]] = {}
    for phase in phases:
        by_name.setdefault(phase.name, []).append(phase)
    return tuple(_sum(alike) for alike in by_name.values())


def _sum(phases: Sequence[PhaseTrace]) -> PhaseTrace:
    highest = max(phases, key=lambda phase: phase.peak_bytes)
    return PhaseTrace(
        name=phases[0].name,
        start=phases[0].start,
        seconds=sum(phase.seconds for phase in phases),
        peak_bytes=highest.peak_bytes,
        peak_weights=highest.peak_weights,
        peak_reserved=max(phase.peak_reserved for phase in phases),
        other_devices={
            name: max(phase.other_devices.get(name, 0) for phase in phases) for name in highest.other_devices
        },
        bytes_in=sum(phase.bytes_in for phase in phases),
        bytes_out=sum(phase.bytes_out for phase in phases),
        runs=sum(phase.runs for phase in phases),
    )


def _phase_mapping(phase: PhaseTrace) -> dict[str, Any]:
    return {
        "name": phase.name,
        "measured_peak_bytes": phase.peak_bytes,
        "seconds": phase.seconds,
        "other_devices": dict(phase.other_devices),
        "bytes_in": phase.bytes_in,
        "bytes_out": phase.bytes_out,
        "runs": phase.runs,
    }


def _table(phases: Sequence[PhaseTrace]) -> list[str]:
    if not phases:
        return ["no phase was measured"]
    shown = phases if len(phases) <= MOST_ROWS else fold_phases(phases)
    folded = [f"  ({len(phases)} phases, added up by name)"] if shown is not phases else []
    return align([HEADINGS, *(_row(phase) for phase in shown)]) + folded


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format `rows` of cells as indented lines: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return lines


def _row(phase: PhaseTrace) -> tuple[str, ...]:
    sizes = (phase.peak_bytes, phase.peak_weights, phase.bytes_in, phase.bytes_out)
    return (_one_line(phase.name), format_seconds(phase.seconds), str(phase.runs), *map(format_bytes, sizes))


def _technique(name: str) -> str:
    return f"{name} ({TECHNIQUES[name]})" if name in TECHNIQUES else _one_line(name)


def _against(what: str, used: int, budget: int) -> str:
    spare = budget - used
    verdict = f"within, {format_bytes(spare)} to spare" if spare >= 0 else f"over by {format_bytes(-spare)}"
    return f"{what}: {format_bytes(used)} of {format_bytes(budget)}, {verdict}"


def _log_value(value: str) -> str:
    plain = value and value.isprintable() and not any(mark in value for mark in ' ="\\')
    return value if plain else json.dumps(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
