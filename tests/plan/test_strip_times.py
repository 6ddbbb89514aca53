"""Strips in numbers: those that are known from the ones before them need not be played."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.plan import strip_times
from tightfit.plan.compute_segments import ComputeSegment, StripRuns, StripStageTiming
from tightfit.plan.strip_times import work_in_strips
from tightfit.plan.timeline import TransferSimulator

MB = 10**6
RATE = 1e9  # bytes a second
NAMES = "abcd"

seconds = st.floats(0, 0.01)


@st.composite
def runs_within(draw: st.DrawFn, strips: int) -> StripRuns:
    """In all strips, in all up to one, or in some of these."""
    end = draw(st.sampled_from([strips, strips, max(strips - 1, 1), max(strips // 2, 1)]))
    return StripRuns(draw(st.sampled_from([end, end, max(end // 3, 1)])), end)


@st.composite
def timings(draw: st.DrawFn) -> list[StripStageTiming]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 60))
        names = draw(st.lists(st.sampled_from(["", *NAMES]), max_size=4))
        turns = [(draw(runs_within(count)), ComputeSegment(name, draw(seconds), draw(seconds) / 5)) for name in names]
        once = [ComputeSegment(name, draw(seconds), 0.0) for name in draw(st.lists(st.sampled_from(NAMES), max_size=1))]
        found.append(
            StripStageTiming(count, draw(st.booleans()), once, turns, draw(seconds) / 5, draw(seconds), draw(seconds))
        )
    return found


def flow(staying: int, ring: int, sizes: list[int]) -> TransferSimulator:
    groups = dict(zip(NAMES, sizes, strict=True))
    return TransferSimulator(NAMES, groups, set(NAMES[:staying]), max(ring, *sizes) + 8192, RATE, 1e-5)


@settings(deadline=None, max_examples=300)
@given(
    timings(), st.integers(0, 4), st.integers(0, 40 * MB), st.lists(st.integers(1, 10 * MB), min_size=4, max_size=4),
    st.integers(1, 2),
)  # fmt: skip
def test_strips_that_are_like_those_before_them_need_not_be_played(
    ways: list[StripStageTiming], staying: int, ring: int, sizes: list[int], items: int
) -> None:
    quick = work_in_strips(ways, items, flow(staying, ring, sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strip_times, "_period", lambda _: 0)
        assert quick == pytest.approx(work_in_strips(ways, items, flow(staying, ring, sizes)), rel=1e-9)
