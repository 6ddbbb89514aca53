"""What CUDA's kernels and copies allocate, in its order, beside what a simulated card does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from simulator.conftest import make_cards  # noqa: F401  a fixture
from simulator.layouts import CUDA_ONLY, OTHERS, POINTWISE, Layout, pairs
from tightfit.devices.cuda_support import cuda_count
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator import storage
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]
# whose buffers are not simulated: cuFFT's and cub's, batch norm's own, what only training needs
UNKNOWN = {"batch norm", "cumsum", "dropout", "fft", "log sigmoid", "softmax in float32", "sort"}
ALL = {name: each for name, each in (POINTWISE | OTHERS | CUDA_ONLY).items() if name not in UNKNOWN}


def asked_of_cuda(work: Callable[[], object]) -> list[int]:
    """Bytes of each request to torch's own allocator."""
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=10_000, clear_history=True
    )
    try:
        work()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def asked_of(card: SimulatedCard, work: Callable[[], object]) -> list[int]:
    free_dead_tensors()
    before = len(card.allocator.history)
    work()
    return [step.size for step in card.allocator.history[before:] if step.what == "malloc"]


def differences(pair: tuple[Layout, Layout], card: SimulatedCard) -> Iterator[str]:
    with torch.no_grad():
        for name, operation in ALL.items():
            real = [layout.on("cuda") for layout in pair]
            try:
                wanted = asked_of_cuda(lambda: operation(*real))  # noqa: B023
            except (IndexError, NotImplementedError, RuntimeError, ValueError):  # not for these shapes
                continue
            mine = [layout.on(SimulatedDevice(0).torch_device) for layout in pair]
            found = asked_of(card, lambda: operation(*mine))  # noqa: B023
            if found != wanted:
                given = [(tuple(part.shape), part.stride()) for part in mine]
                yield f"{name} of {given}: {found} instead of {wanted}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs())
def test_kernels_allocate_what_cudas_do(make_cards, monkeypatch, pair) -> None:  # noqa: F811
    monkeypatch.setattr(storage, "SMALL", 0)
    (card,) = make_cards(values="shapes")
    for device in ("cuda", SimulatedDevice(0).torch_device):  # workspaces that stay, cuBLAS's and cuBLASLt's
        square = torch.zeros(2, 2, device=device)
        torch.addmm(square[0], square, square)
    assert list(differences(pair, card)) == []


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole,
    "permuted": lambda whole: whole.permute(2, 0, 1),
    "with gaps": lambda whole: whole[:, ::2],
    "expanded": lambda whole: whole[:1].expand(6, 40, 50),
}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("dtypes", [*itertools.product([torch.float32, torch.bfloat16], repeat=2)])
@pytest.mark.parametrize("layout", LAID_OUT)
def test_copies_allocate_what_cudas_do(make_cards, layout, dtypes, waits) -> None:  # noqa: F811
    (card,) = make_cards(values="real")
    torch.cuda.init()
    place, (before, after) = LAID_OUT[layout], dtypes

    def work(device: str | torch.device) -> None:
        there = place(torch.zeros(6, 40, 50, dtype=before)).to(device, after, non_blocking=not waits)
        there.copy_(place(torch.zeros(6, 40, 50, dtype=before)), non_blocking=not waits)
        place(torch.zeros(6, 40, 50, dtype=before, device=device)).to("cpu", after, non_blocking=not waits)

    assert asked_of(card, lambda: work(SimulatedDevice(0).torch_device)) == asked_of_cuda(lambda: work("cuda"))


def full(*shape: int) -> Callable[..., torch.Tensor]:
    return lambda **how: torch.zeros(*shape, **how)


# a bias, its layout, and how much of it is added
BIASES: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "row": (full(24), 1.0),
    "row of a matrix": (full(1, 24), 1.0),
    "with gaps": (lambda **how: torch.zeros(48, **how)[::2], 1.0),
    "expanded": (lambda **how: torch.zeros(1, **how).expand(24), 1.0),
    "half a row": (full(24), 0.5),
    "column": (full(8, 1), 1.0),
    "matrix": (full(8, 24), 1.0),
    "half a matrix": (full(8, 24), 0.5),
    "none of a matrix": (full(8, 24), 0.0),
    "transposed matrix": (lambda **how: torch.zeros(24, 8, **how).t(), 1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", BIASES)
def test_products_allocate_what_cudas_do(make_cards, bias, dtype) -> None:  # noqa: F811
    """cuBLAS or cuBLASLt, each of which has a workspace of its own from torch 2.15 on."""
    (card,) = make_cards(values="shapes")
    make, beta = BIASES[bias]

    def work(device: str | torch.device) -> None:
        how = {"dtype": dtype, "device": device}
        left, right = torch.zeros(8, 16, **how), torch.zeros(16, 24, **how)
        torch.addmm(make(**how), left, right, beta=beta)
        torch.mm(left, right)

    for device in ("cuda", SimulatedDevice(0).torch_device):
        work(device)  # a workspace that stays
    assert asked_of(card, lambda: work(SimulatedDevice(0).torch_device)) == asked_of_cuda(lambda: work("cuda"))
