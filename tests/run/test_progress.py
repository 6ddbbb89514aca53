"""Planning shows how far it is and the time left, to a command, in a bar like those of diffusers, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tightfit
from simulator.conftest import MakeCards
from tightfit import measure_footprint, progress
from tightfit.progress import ProgressTracker, listening, showing
from tiny_pipelines import CASES, run

MIB = 2**20


def test_the_time_left_is_what_the_rest_takes_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now, on_progress = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    work = ProgressTracker(2.0)
    with listening(lambda share, left: on_progress.append((share, left))):
        now[0] += 3
        work.did(0.5)
        work.expect(2.0)
        now[0] += 3
        work.did(1.5)
        work.did(2.0)
    assert on_progress == [(0.25, 9.0), (0.5, 6.0), (1.0, 0.0)]
    work.did(1.0)  # nobody listens


def test_measuring_tells_how_far_it_is() -> None:
    on_progress: list[tuple[float, float]] = []
    with listening(lambda share, left: on_progress.append((share, left))):
        measure_footprint(CASES[0].make(), {"height": 64, "width": 64, "steps": 2})
    shares = [share for share, _ in on_progress]
    assert len(shares) >= 4
    assert shares[-1] == 1
    assert all(0 < share <= 1 and left >= 0 for share, left in on_progress)
    assert on_progress[-1][1] == 0


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All bars that are made, shown at once."""
    import tqdm.auto

    made: list[Any] = []

    class Bar(tqdm.auto.tqdm):  # type: ignore[misc, type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return made


def test_the_first_call_shows_a_bar(
    make_cards: MakeCards,
    bars: list[Any],
    capsys: pytest.CaptureFixture[str],
    new_cache: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache()))  # in which nothing is measured yet
    make_cards(capacity=2**30)
    pipe = CASES[0].make()
    pipe.set_progress_bar_config()
    tightfit.fit(pipe, budget=512 * MIB, device="simulated:0")
    run(pipe, CASES[0])
    assert "planning" in (shown := capsys.readouterr().err)
    assert "left" in shown
    made = len(bars)
    run(pipe, CASES[0])
    assert len(bars) == made  # nothing is planned for again


@pytest.mark.parametrize("disable", [True, False])
def test_whoever_wants_no_bars_sees_none(disable: bool, bars: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with showing("planning", {"disable": disable}):
        ProgressTracker(1.0).did(0.5)
    shown = capsys.readouterr().err
    assert ("planning" in shown) == (not disable)
    assert ("left" in shown) == (not disable)  # however soon after the bar


def test_where_a_command_listens_there_is_no_bar(bars: list[Any]) -> None:
    on_progress: list[float] = []
    with listening(lambda share, left: on_progress.append(share)), showing("planning", {}):
        ProgressTracker(1.0).did(0.5)
    assert (on_progress, bars) == ([0.5], [])


def test_what_is_over_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with showing("planning", {}):
        ProgressTracker(1.0).did(0.5)
    assert capsys.readouterr().err == ""
