"""Phases in progress: of calls of the same kind the one with the highest peak is kept."""

from __future__ import annotations

from tightfit.measure.passes import OpenBlockUse, OpenCall, OpenPhase


def test_a_repetition_with_a_higher_peak_leaves_out_as_much() -> None:
    phase = OpenPhase("denoise", 0)
    for peak, left_out_from in ((5, 0), (7, None), (6, None)):
        segments = [OpenBlockUse("blocks.0", 1, peak)]
        phase.add(OpenCall("transformer", "forward", (), segments, left_out_from=left_out_from), segments)
    (call,) = phase.phase({"transformer": ["blocks.0"]}, 7).calls
    assert call.peak == 7
    assert call.left_out_from == 0
