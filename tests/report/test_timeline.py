"""The picture of one call: that it is written, whole or not at all, and that nothing in it is lost or collides."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tightfit.errors import InputError
from tightfit.report.figure import BINS, Curve, bytes_scale, seconds_scale, spread
from tightfit.report.summary import Report
from tightfit.report.timeline import _compose, draw_timeline
from tightfit.schema.machine import Budget
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.results import PhaseTrace, Sample, Trace
from tightfit.signals import unfinished

GIB = 2**30


def trace_of(*, encode: float = 0.02, denoise: float = 5.0, decode: float = 0.2, steps: int = 20) -> Trace:
    """A streamed run: encoder weights come up like stairs, twenty teeth of activations, a spike at the end."""
    samples = [(encode * i / 16, GIB * (i + 1) // 10, 0.02 * GIB) for i in range(16)]
    for i in range(steps * 14):
        teeth = 0.3 + 0.9 * math.sin(math.pi * (i % 14 + 0.5) / 14)
        samples.append((encode + denoise * i / (steps * 14), GIB + GIB // 5 * (i % 2), teeth * GIB))
    samples += [(encode + denoise + decode * i / 10, GIB // 8, 0.3 * GIB * i) for i in range(10)]
    rows = tuple(Sample(seconds=at, weights=int(weights), activations=int(rest)) for at, weights, rest in samples)
    phases = (
        PhaseTrace(name="encode", start=0, seconds=encode, peak_bytes=int(1.62 * GIB), peak_weights=int(1.6 * GIB)),
        PhaseTrace(name="denoise", start=encode, seconds=denoise, peak_bytes=int(2.4 * GIB), runs=steps),
        PhaseTrace(name="decode", start=encode + denoise, seconds=decode, peak_bytes=int(2.825 * GIB)),
    )
    return Trace(device="cuda:0", seconds=encode + denoise + decode, phases=phases, samples=rows)


def report_of(trace: Trace | None = None, budget: str | None = None) -> Report:
    parts = {"transformer": ComponentPlan(placement="stream"), "vae": ComponentPlan()}
    limit = Budget.from_mapping({"device": budget}) if budget else None
    return Report(Plan(device="cuda:0", level=3, components=parts, budget=limit), trace or trace_of())


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.mark.parametrize(("name", "magic"), [("run.png", b"\x89PNG"), ("run.SVG", b"<?xml")])
def test_writes_the_kind_that_the_suffix_names_and_nothing_else(tmp_path: Path, name: str, magic: bytes) -> None:
    before = dict(mpl.rcParams)
    draw_timeline(report_of(budget="4GB"), tmp_path / name, title="a run for $5 & <more>")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert dict(mpl.rcParams) == before


def test_svg_is_sound_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        draw_timeline(report_of(), path)
    assert ET.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["run.pdf", "run"])
def test_another_suffix_is_refused_with_the_two_that_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        draw_timeline(report_of(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        draw_timeline(report_of(), tmp_path / "nowhere" / "run.png")


def test_failure_leaves_the_old_picture_and_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_figure: Figure, path: Path, **_options: object) -> None:
        path.write_bytes(b"half")
        assert list(tmp_path.iterdir()) == [old] or sys.platform != "linux"  # a process that is killed here leaves none
        assert any(name.startswith(str(tmp_path)) for name in unfinished)  # a signal deletes it
        raise OSError("disk full")

    old = tmp_path / "run.png"
    old.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_timeline(report_of(), old)
    assert old.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("phases", [(), trace_of().phases])
def test_few_samples(tmp_path: Path, count: int, phases: tuple[PhaseTrace, ...]) -> None:
    samples = trace_of().samples[:count]
    draw_timeline(report_of(Trace(seconds=0, phases=phases, samples=samples)), tmp_path / "run.png")


def test_says_what_was_run_and_how() -> None:
    said = texts_of(_compose(report_of(budget="4GiB"), "a title"))
    assert {"a title", "encode", "denoise", "decode", "5 s · 2.4 GiB", "peak 2.82 GiB", "budget\n4 GiB"} <= set(said)
    assert "level 3 · cuda:0 · lossless · stream: transformer" in said


def test_over_budget_is_said_and_a_far_budget_is_not_drawn() -> None:
    assert "peak 2.82 GiB, 845 MiB over" in texts_of(_compose(report_of(budget="2GiB"), None))
    far = texts_of(_compose(report_of(budget="80GiB"), None))
    assert not any(text.startswith("budget\n") for text in far)
    assert any("budget 80 GiB, above this chart" in text for text in far)


def test_labels_of_narrow_phases_do_not_collide() -> None:
    narrow = [PhaseTrace(name=f"part {i}", start=i / 1000, seconds=0.001, peak_bytes=GIB) for i in range(4)]
    wide = PhaseTrace(name="denoise", start=0.004, seconds=5, peak_bytes=2 * GIB)
    figure = _compose(report_of(Trace(seconds=5.004, phases=(*narrow, wide))), None)
    names = [text for text in figure.findobj(Text) if text.get_text() in {"denoise", *(p.name for p in narrow)}]
    boxes = sorted((text.get_window_extent() for text in names), key=lambda box: box.x0)
    assert len(boxes) == 5
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[0].x0 >= 0
    assert boxes[-1].x1 <= figure.bbox.width


def test_components_that_take_turns_are_named_once() -> None:
    turns = tuple(PhaseTrace(name="ab"[i % 2], start=i, seconds=1, peak_bytes=GIB) for i in range(60))
    said = texts_of(_compose(report_of(Trace(seconds=60, phases=turns)), None))
    assert said.count("a \u00d730") == said.count("b \u00d730") == 1


def test_a_peak_between_samples_is_the_one_shown() -> None:
    phase = PhaseTrace(name="decode", start=0, seconds=2, peak_bytes=900)
    samples = (Sample(seconds=0, weights=100, activations=0), Sample(seconds=1, weights=100, activations=50))
    curve = Curve.of(Trace(seconds=2, phases=(phase,), samples=samples))
    assert (curve.peak, curve.peak_at) == (900, 1)


def test_a_hundred_thousand_samples_are_thinned_without_losing_the_one_that_counts() -> None:
    samples: list[Any] = [SimpleNamespace(seconds=i / 1e4, weights=100, activations=i % 7) for i in range(100_000)]
    samples[61_234] = Sample(seconds=6.1234, weights=100, activations=900)
    curve = Curve.of(Trace.model_construct(seconds=10.0, phases=(), samples=tuple(samples)))
    total = curve.weights + curve.activations
    highest = int(total.argmax())
    assert len(total) <= 2 * BINS + 1
    assert (curve.peak, curve.peak_at, total[highest]) == (1000, 6.1234, 1000)
    assert curve.seconds[highest] == pytest.approx(6.1234, abs=10 / BINS)
    assert curve.seconds[highest + 1] - curve.seconds[highest] == pytest.approx(10 / BINS)
    assert (curve.seconds[1:] >= curve.seconds[:-1]).all()


def test_values_hold_until_the_next_sample() -> None:
    samples = tuple(Sample(seconds=at, weights=w, activations=0) for at, w in [(0, 9), (0.001, 4), (6, 7)])
    curve = Curve.of(Trace(seconds=10, phases=(), samples=samples))
    assert curve.weights.tolist() == [9, 4, 7, 7]
    assert curve.seconds.tolist() == pytest.approx([0, 10 / BINS, 6, 10])


def test_spread_keeps_order_room_and_what_is_free() -> None:
    middles = spread([0.0, 0.01, 0.5, 0.99], [0.2] * 4, 0.0, 1.0)
    assert middles == pytest.approx([0.1, 0.3, 0.5, 0.9])


@pytest.mark.parametrize(("top", "name"), [(3 * GIB, "GiB"), (0.9 * GIB, "MiB"), (5, "B"), (0.5, "B")])
def test_bytes_scale(top: float, name: str) -> None:
    assert bytes_scale(top).name == name


@pytest.mark.parametrize(("end", "name"), [(0.3, "ms"), (100, "s"), (400, "min"), (9000, "h")])
def test_seconds_scale(end: float, name: str) -> None:
    assert seconds_scale(end).name == name
