"""While a pipeline is fitted its weights are in memory once: not in a copy for measuring, nor in a page-locked one.

The memory of the stub's cards is shared memory, so it is not part of a process's anonymous memory; what is page-locked
is.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tightfit
from anonymous_memory import anonymous_bytes, highest_anonymous
from own_process import started, told
from tightfit.catalog.known import known_model
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components, weight_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux"),
]

MB = 10**6
MORE = 300 * MB  # what fitting may take beside the weights


def test_a_9_gb_pipeline_within_3_gb(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < 12 * 10**9:
        pytest.skip("needs 12 GB of RAM")
    found = told(started(__file__, "fit_9_gb", XDG_CACHE_HOME=str(tmp_path)))
    print(f"fitting took {found} bytes beside the weights")
    assert max(found["smaps_rollup"], found["rss_anon"]) <= MORE


def fit_9_gb() -> None:
    """Prints how many bytes more than before were anonymous at the most while a pipeline was fitted."""
    pipe = a_pipeline_of_9_gb()
    torch.zeros(1, device="cuda")
    gc.collect()
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen:
        fitted = tightfit.fit(pipe, budget="3GB", device="cuda", request={"height": 1024, "width": 1024})
    assert fitted.plan.forecast
    assert "stream" in {part.placement for part in fitted.plan.components.values()}
    fitted.undo()
    more = {"smaps_rollup": seen.most - before, "rss_anon": seen.counted - before}
    print(json.dumps(more | {"gap": round(seen.gap, 3)}))


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
    found = told(started(__file__, "take_64_mb_each"))
    assert 64 <= found["plain"] < 96
    assert 64 <= found["locked"] < 96


def take_64_mb_each() -> None:
    """Prints how many MB more were anonymous where a tensor was made and copied to a card, and page-locked."""
    torch.zeros(1, device="cuda")
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen:
        plain = torch.ones(64 * MB, dtype=torch.uint8)
        on_card = plain.to("cuda")
    found = {"plain": (seen.most - before) / MB}
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen:
        locked = plain.pin_memory()
    found["locked"] = (seen.most - before) / MB
    del on_card, locked
    print(json.dumps(found))
