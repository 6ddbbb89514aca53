"""Phases in progress: which of several calls of the same kind is kept, and layers that run once for each chunk."""

from __future__ import annotations

import torch

from tightfit.measure.passes import OpenBlockUse, OpenCall, OpenPhase
from tightfit.schema.machine import Amounts
from tightfit.simulator.kernel_costs import KernelCost


def test_a_repetition_with_a_higher_peak_leaves_out_as_much() -> None:
    phase = OpenPhase("denoise", 0)
    for peak, left_out_from in ((5, 0), (7, None), (6, None)):
        segments = [OpenBlockUse("blocks.0", 1, peak)]
        phase.add(OpenCall("transformer", "forward", (), segments, left_out_from=left_out_from), segments)
    (call,) = phase.phase({"transformer": ["blocks.0"]}, 7).calls
    assert call.peak == 7
    assert call.left_out_from == 0


def test_layers_of_a_feed_forward_in_chunks_hold_their_weights_and_are_needed_once() -> None:
    work = KernelCost("matmul", torch.float32, Amounts(10, 10))
    use = OpenBlockUse("blocks.0", 0, 0, [], False, {"up": "ff", "down": "ff", "other.up": "other"})
    for live, layer in enumerate(("to_out", "", *(3 * ("up", "", "down", "")), "other.up", "to_q")):
        use.add(layer, work, live)
    assert use.peak == 15
    assert [
        (each.layer, each.holds, sum(group.kernels for group in each.work)) for each in use.use().layer_work
    ] == [
        ("to_out", False, 1), ("", False, 1), ("up", True, 1), ("", False, 1), ("down", False, 5), ("", False, 5),
        ("other.up", False, 1), ("to_q", False, 1),
    ]  # fmt: skip


def test_of_calls_with_equal_peaks_the_last_is_kept() -> None:
    phase = OpenPhase("denoise", 0)
    for start in (1, 2):
        segments = [OpenBlockUse("blocks.0", start, 5)]
        phase.add(OpenCall("transformer", "forward", (), segments), segments)
    (call,) = phase.phase({"transformer": ["blocks.0"]}, 5).calls
    assert call.block_uses[0].live_bytes_at_start == 2
