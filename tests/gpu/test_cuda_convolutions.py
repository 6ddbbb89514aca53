"""What convolutions hold while they run: torch's own copies, and a workspace as large as is assumed.

On a stand-in for the CUDA runtime only, whose workspaces are (STUB_CUDNN_WORKSPACE=copies) what is assumed of cuDNN's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.conftest import make_cards  # noqa: F401  a fixture
from simulator.layouts import convolved, kernel, pairs
from tightfit.devices.cuda_support import cuda_count
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator import storage
from tightfit.simulator.storage import free_dead_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif(os.environ.get("STUB_CUDNN_WORKSPACE") != "copies", reason="a card's workspaces are its own"),
]


def above(
    call: Callable[[], object], now: Callable[[], int], reset: Callable[[], None], most: Callable[[], int]
) -> int:
    """Bytes that `call` took beside what was there, at the most."""
    before = now()
    reset()
    with torch.no_grad():
        kept = call()
    taken = most() - before
    del kept
    return taken


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs(4, 4), length=st.sampled_from((1, 3)), last=st.booleans())
def test_bytes_of_a_convolution(make_cards, monkeypatch, pair, length, last) -> None:  # noqa: F811
    monkeypatch.setattr(storage, "SMALL", 0)
    (card,) = make_cards(values="shapes")
    found = []
    for device in ("cuda", SimulatedDevice(0).torch_device):
        maps = pair[0].on(device)
        weight = kernel(maps, 4, length)
        weight = weight.to(memory_format=torch.channels_last) if last else weight

        def simulated() -> int:
            free_dead_tensors()
            return card.allocator.allocated.now

        counters = (
            (torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated)
            if device == "cuda"
            else (simulated, card.allocator.allocated.reset_peak, lambda: card.allocator.allocated.peak)
        )
        found.append(above(lambda maps=maps, weight=weight: convolved(maps, weight), *counters))
    assert found[1] == found[0]
