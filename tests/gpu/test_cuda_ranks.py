"""What ranks do on a card: attention to some of the keys, and its log-sum-exp; page-locked weights that they share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tightfit
from cuda_stub import driver
from cuda_stub.compute import computing
from cuda_stub.plugin import rates_without_numbers
from inspection import imprint
from own_process import started, told
from tightfit.apply.context_parallel.attention import _fused_kernel, _merged, _partial
from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.devices.cuda_support import cuda_count
from tightfit.run import context_parallel
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

KINDS = [(torch.float32, 64, 2e-5), (torch.float16, 64, 2e-3), (torch.float16, 40, 2e-3), (torch.float32, 6, 2e-5)]


@pytest.mark.parametrize(("dtype", "width", "close"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
def test_shares_of_the_keys_add_up(dtype: torch.dtype, width: int, close: float) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, rows, width, dtype=dtype, device="cuda") for rows in (37, 50, 50))
    expected = F.scaled_dot_product_attention(query, key, value).float()
    parts = [_partial(query, key[:, :, rows], value[:, :, rows], None) for rows in (slice(0, 23), slice(23, 50))]
    found, total = _merged(*parts)
    assert total.shape == (1, 4, 37, 1)
    assert (found - expected).abs().max() <= close * expected.abs().max()


def test_usual_heads_have_a_fused_kernel() -> None:
    query = torch.empty(1, 4, 16, 64, dtype=torch.float16, device="cuda")
    assert _fused_kernel(query, query, query) in ("flash", "efficient")
    odd = query[..., :6]
    assert _fused_kernel(odd, odd, odd) is None


# two ranks that share weights in host memory, each with a card of its own; on the stub, where locked ranges are counted


def shares() -> None:
    """One rank: its picture beside that of one process, and what is page-locked; called in a process of its own."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
    case = next(case for case in CASES if case.name == "Flux")
    found: dict[str, Any] = {}
    with computing(), rates_without_numbers(), torch.no_grad():
        pipe = case.make()
        alone = tightfit.fit(pipe, level=3, device=f"cuda:{rank}")
        expected = run(pipe, case).cpu()
        alone.undo()
        before = imprint(pipe)
        whole = {"level": 3, "vae": {"shared": False}}
        # gloo sends no tensors of the stub's cards: each rank computes all rows
        context_parallel.doubled_of = lambda *_: {"transformer": "each rank runs all of it here"}
        DoubledInputs.guesses = lambda *_: iter(())  # type: ignore[method-assign]
        fitted = tightfit.fit(pipe, plan=whole, device=f"cuda:{rank}", parallel="auto")
        found |= {"ranges": driver.count("registered"), "locked": driver.count("locked_now")}
        pictures = [run(pipe, case).cpu() for _ in range(2)]
        found["apart"] = max(float((each - expected).abs().max() / expected.abs().max()) for each in pictures)
        pipe.transformer.x_embedder.weight.data.add_(rank)  # what one rank writes is not the other's
        found["notes"] = list(fitted.report().trace.notes)
        found["ranges later"] = driver.count("registered")
        fitted.undo()
        assert_changed_alone(before, imprint(pipe), rank)
    found |= {"left": driver.count("registered"), "left locked": driver.count("locked_now")}
    print(json.dumps(found | {"races": driver.count("races") + driver.count("hazards")}), flush=True)
    dist.barrier()


def assert_changed_alone(before: Any, after: Any, rank: int) -> None:
    """All weights are as before, but for those to which this rank added its number."""
    assert after.attributes == before.attributes
    for (name, *_), then, now in zip(after.tensors, before.values, after.values, strict=True):
        assert torch.equal(now, then + rank if name == "transformer.x_embedder.weight" else then), name


@pytest.mark.skipif(not driver.loaded() or not dist.is_available(), reason="counts what the stub has page-locked")
def test_ranks_lock_the_pages_of_one_copy_each_for_itself(tmp_path: Path) -> None:
    settings = {"STUB_CARDS": "2", "STUB_PAGES": "1", "STORE": str(tmp_path / "store")}
    ranks = [started(__file__, "shares", **settings, RANK=str(rank)) for rank in range(2)]
    for rank, found in enumerate(map(told, ranks)):
        assert found["apart"] <= 1e-5, found
        assert found["ranges"] == found["ranges later"] > 10, found
        assert found["locked"] > 2**17
        (shared,) = [note for note in found["notes"] if note.endswith("are one copy for 2 ranks")]
        (locked,) = [note for note in found["notes"] if note.endswith("are page-locked by this rank")]
        size = shared.removeprefix(f"rank {rank} of 2: ").partition(" of weights")[0]
        assert locked.startswith(f"rank {rank} of 2: {size} of weights"), found
        assert (found["left"], found["left locked"]) == (0, 0), found
