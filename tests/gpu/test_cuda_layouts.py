"""Strides of CUDA's kernels, beside those of a simulated card without numbers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from simulator.conftest import make_cards  # noqa: F401  a fixture
from simulator.layouts import CONVOLUTIONS, CUDA_ONLY, OTHERS, POINTWISE, differences, pairs
from tightfit.devices.cuda_support import cuda_count
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator import storage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]
ALL = POINTWISE | OTHERS | CONVOLUTIONS | CUDA_ONLY


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs())
def test_strides_are_those_of_cudas_kernels(make_cards, monkeypatch, pair) -> None:  # noqa: F811
    monkeypatch.setattr(storage, "SMALL", 0)
    make_cards(values="shapes")
    assert list(differences(pair, ALL, "cuda", SimulatedDevice(0).torch_device)) == []
