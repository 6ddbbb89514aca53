"""On a real card: the allocator's settings are the caller's again afterwards, and free bytes are those of the cap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tightfit
from tightfit.devices import cuda
from tightfit.devices.choose import choose_device
from tightfit.devices.cuda import CudaDevice
from tightfit.devices.cuda_support import cuda_count
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

MIB = 2**20
set_to = torch._C._accelerator_setAllocatorSettings


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    monkeypatch.setattr(cuda, "_SHARES", cuda._Shares())
    torch.cuda.empty_cache()
    before = cuda._allocator_settings()
    yield CudaDevice(0)
    set_to(before or "expandable_segments:False")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def grows() -> bool:
    """Whether a new segment is expandable."""
    torch.cuda.empty_cache()
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    spans = [(each["address"], each["total_size"], each["is_expandable"]) for each in torch.cuda.memory_snapshot()]
    return next(expandable for begin, size, expandable in spans if 0 <= large.data_ptr() - begin < size)


def test_segments_are_as_they_were(card: CudaDevice) -> None:
    for before, after in (
        ("max_split_size_mb:128", False),
        ("max_split_size_mb:128,expandable_segments:True", True),
        ("expandable_segments:False", False),
    ):
        set_to(before)
        undo = card.use_expandable_segments()
        assert grows()
        undo()
        assert grows() == after, before


def test_segments_grow_until_the_last_caller_is_done(card: CudaDevice) -> None:
    set_to("expandable_segments:False")
    first, second = card.use_expandable_segments(), card.use_expandable_segments()
    first()
    assert grows()
    second()
    assert not grows()


def test_an_ignored_setting_is_found_out(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_FIXED", {})
    assert card.expandable_refused() is None
    assert not grows()  # it was only tried
    monkeypatch.setattr(cuda, "_FIXED", {})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda said: None)  # as on Windows
    assert card.expandable_refused() == "torch ignores the setting expandable_segments here"
    card.use_expandable_segments()()


def test_a_refusal_of_the_driver_is_found_out(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUDA driver error: unknown error")

    monkeypatch.setattr(cuda, "_FIXED", {})
    monkeypatch.setattr(torch, "empty", refuse)
    assert card.expandable_refused() == "the driver refuses expandable segments: CUDA driver error: unknown error"
    monkeypatch.undo()
    assert not grows()


def test_a_plan_for_fixed_segments_is_made_and_said(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_FIXED", {0: "a test says so"})
    case = next(case for case in CASES if case.name == "StableDiffusion")
    fitted = tightfit.fit(pipe := case.make(), budget=512 * MIB, device="cuda:0", request={})
    assert not fitted.plan.expandable_segments
    assert any(reason.because == "a test says so" for reason in fitted.plan.reasons)
    plan = fitted.plan.model_copy(update={"expandable_segments": True, "budget": None})
    fitted = tightfit.fit(pipe, plan=plan, device="cuda:0")
    run(pipe, case)
    assert any("a test says so" in note for note in fitted.report().trace.notes)
    fitted.undo()


def test_a_cap_never_raises_and_is_taken_back(card: CudaDevice) -> None:
    total = card.total_bytes()
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    first, second = card.limit_memory(total // 2), card.limit_memory(total // 8)
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(0.125)
    first()
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(0.125)
    second()
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.25


def test_no_more_is_reserved_than_the_cap_where_segments_are_expandable(card: CudaDevice) -> None:
    """torch compares requests with its limit, and maps larger pages for them."""
    grow = card.use_expandable_segments()
    torch.cuda.empty_cache()
    size = torch.cuda.memory_reserved(0) + 130 * MIB  # no multiple of a page
    undo = card.limit_memory(size)
    with pytest.raises(torch.OutOfMemoryError):
        [torch.empty(21 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(100)]
    assert size - 40 * MIB < torch.cuda.memory_reserved(0) <= size
    undo()
    grow()


def test_free_bytes_are_those_of_the_cap(card: CudaDevice) -> None:
    free = card.free_bytes()
    undo = card.limit_memory(256 * MIB)
    there = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0")
    assert 0 < card.free_bytes() <= 156 * MIB
    torch.empty(card.free_bytes() - 24 * MIB, dtype=torch.uint8, device="cuda:0")  # segments are of whole pages
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(card.free_bytes() + 2 * MIB, dtype=torch.uint8, device="cuda:0")
    del there
    undo()
    assert card.free_bytes() == pytest.approx(free, rel=0.05)


def test_figures_are_those_that_torch_tells(card: CudaDevice) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.empty(50 * MIB, dtype=torch.uint8, device="cuda:0")
    assert card.allocated_bytes() == torch.cuda.memory_allocated(0) >= kept.nbytes
    assert card.peak_bytes() == torch.cuda.max_memory_allocated(0) >= kept.nbytes + 50 * MIB


def test_a_budget_beside_other_tensors(card: CudaDevice) -> None:
    case = next(case for case in CASES if case.name == "StableDiffusion")
    there = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda:0")
    fitted = tightfit.fit(pipe := case.make(), budget=512 * MIB, device="cuda:0", example=case.call())
    assert fitted.plan.predicted_peak("cuda:0") <= 112 * MIB
    run(pipe, case)
    assert not [note for note in fitted.report().trace.notes if "out of memory" in note]
    assert there.is_cuda
    fitted.undo()


@pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards")
def test_the_current_card_is_meant() -> None:
    with torch.cuda.device(1):
        assert [choose_device(name).name for name in (None, "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]


@pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards")
def test_a_card_without_work_is_capped_too(card: CudaDevice) -> None:
    case = next(case for case in CASES if case.name == "StableDiffusion")
    fitted = tightfit.fit(case.make(), budget={"cuda:0": 512 * MIB, "cuda:1": 512 * MIB}, request={})
    assert len(fitted.plan.devices) == 1, str(fitted.plan)
    for index in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(514 * MIB, dtype=torch.uint8, device=f"cuda:{index}")
    fitted.undo()
    torch.empty(514 * MIB, dtype=torch.uint8, device="cuda:1")
