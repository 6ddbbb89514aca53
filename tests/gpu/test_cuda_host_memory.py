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
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux"),
]

MB = 10**6
MORE = 300 * MB  # what fitting may take beside the weights


def anonymous(cards: set[int]) -> int:
    """Bytes of anonymous memory of this process and of those that it started, without a stub's cards.

    Those are memory of this process, too: the mappings in which segments of torch's allocator begin. `cards` gets to
    know them.
    """
    this = psutil.Process()
    cards |= {segment["address"] for segment in torch.cuda.memory_snapshot()}
    mappings = [each for process in (this, *this.children(recursive=True)) for each in _mappings(process.pid)]
    return sum(size for begin, end, size in mappings if not any(begin <= address < end for address in cards))


def _mappings(pid: int) -> list[tuple[int, int, int]]:
    """Where each mapping begins and ends, and how many of its bytes are anonymous."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:  # it has ended
        return []
    spans = [line.split()[0].split("-") for line in lines if "-" in line.partition(" ")[0]]
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:")]
    return [(int(begin, 16), int(end, 16), size) for (begin, end), size in zip(spans, sizes, strict=True)]


@contextmanager
def highest() -> Iterator[list[int]]:
    """The most that `anonymous` was within, as the list's only item."""
    cards: set[int] = set()
    seen, over = [anonymous(cards)], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen[0] = max(seen[0], anonymous(cards))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_a_9_gb_pipeline_within_3_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if psutil.virtual_memory().available < 12 * 10**9:
        pytest.skip("needs 12 GB of RAM")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with _disable_current_modes():  # nobody needs the stub's numbers
        pipe = a_pipeline_of_9_gb()
        torch.zeros(1, device="cuda")
        gc.collect()
        before = anonymous(set())
        with highest() as most:
            fitted = tightfit.fit(pipe, budget="3GB", device="cuda", request={"height": 1024, "width": 1024})
    assert fitted.plan.forecast
    assert "per-unit" in {part.placement for part in fitted.plan.components.values()}
    print(f"fitting took {(most[0] - before) / MB:.0f} MB of RAM beside the weights")
    assert most[0] - before <= MORE
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
