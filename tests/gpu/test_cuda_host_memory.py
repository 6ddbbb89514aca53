"""While a pipeline is fitted its weights are in memory once: not in a copy for measuring, nor in a page-locked one.

The memory of the stub's cards is shared memory, so it is not part of a process's anonymous memory; what is page-locked
is.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import tightfit
from anonymous_memory import anonymous_bytes, highest_anonymous
from tightfit.catalog.known import known_model
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.building import build_known
from tightfit.measure.modules import find_components, weight_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux"),
]

MB = 10**6
MORE = 300 * MB  # what fitting may take beside the weights


def test_a_9_gb_pipeline_within_3_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if psutil.virtual_memory().available < 12 * 10**9:
        pytest.skip("needs 12 GB of RAM")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with _disable_current_modes():  # nobody needs the stub's numbers
        pipe = a_pipeline_of_9_gb()
        torch.zeros(1, device="cuda")
        gc.collect()
        before = anonymous_bytes(os.getpid())
        with highest_anonymous() as seen:
            fitted = tightfit.fit(pipe, budget="3GB", device="cuda", request={"height": 1024, "width": 1024})
    assert fitted.plan.forecast
    assert "per-unit" in {part.placement for part in fitted.plan.components.values()}
    more = [most - before for most in (seen.most, seen.counted)]
    print(f"fitting took {[round(each / MB) for each in more]} MB beside the weights: {seen}")
    assert max(more) <= MORE
    fitted.undo()


def a_pipeline_of_9_gb() -> Any:
    """Sana with values in its weights, so that their memory is taken."""
    pipe = build_known(known_model("sana-1.6b"))
    tensors = []
    for module in find_components(pipe).values():
        module.to_empty(device="cpu")
        tensors += weight_tensors(module)
    for tensor in tensors:
        tensor.data.fill_(0.01)
    assert 9_000 * MB < sum(tensor.nbytes for tensor in tensors) < 9_500 * MB
    return pipe


def test_what_is_page_locked_counts_and_what_is_on_a_card_does_not() -> None:
    size = 64 * MB
    with _disable_current_modes():
        gc.collect()
        before = anonymous_bytes(os.getpid())
        with highest_anonymous() as seen:
            plain = torch.ones(size, dtype=torch.uint8)
            on_card = plain.to("cuda")
        assert size <= seen.most - before < 1.5 * size
        before = anonymous_bytes(os.getpid())
        with highest_anonymous() as seen:
            locked = plain.pin_memory()
        assert size <= seen.most - before < 1.5 * size
    del on_card, locked
