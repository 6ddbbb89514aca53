"""While a pipeline is fitted its weights are in memory once: not in a copy for measuring, nor in a page-locked one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import tightfit
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


def anonymous() -> int:
    """Bytes of anonymous memory of this process and of those that it started."""
    this = psutil.Process()
    return sum(_anonymous(process.pid) for process in (this, *this.children(recursive=True)))


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@contextmanager
def highest() -> Iterator[list[int]]:
    """The most that `anonymous` was within, as the list's only item."""
    seen, over = [anonymous()], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen[0] = max(seen[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_an_8_gb_pipeline_within_3_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if psutil.virtual_memory().available < 12 * 10**9:
        pytest.skip("needs 12 GB of RAM")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with _disable_current_modes():  # nobody needs the stub's numbers
        pipe = a_pipeline_of_8_gb()
        torch.zeros(1, device="cuda")
        gc.collect()
        before = anonymous()
        with highest() as most:
            fitted = tightfit.fit(pipe, budget="3GB", device="cuda", request={"height": 1024, "width": 1024})
    assert fitted.plan.forecast
    assert fitted.plan.components["unet"].placement == "per-unit"
    assert most[0] - before <= MORE
    fitted.undo()


def a_pipeline_of_8_gb() -> Any:
    """SDXL with its text encoders in float32: weights with values, so that their memory is taken."""
    pipe = build_known(known_model("sdxl"), torch.bfloat16)
    for name in ("text_encoder", "text_encoder_2"):
        getattr(pipe, name).to(torch.float32)
    tensors = []
    for module in find_components(pipe).values():
        module.to_empty(device="cpu")
        tensors += weight_tensors(module)
    for tensor in tensors:
        tensor.data.fill_(0.01)
    assert 8_000 * MB < sum(tensor.nbytes for tensor in tensors) < 9_000 * MB
    return pipe
