"""Page-locked masters: locked for as long as they are there, and there for as long as they are locked."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit import fit
from tightfit.devices.copy_stream import CopyStream, LateCopyStream
from tightfit.devices.device import LoopbackDevice
from tightfit.measure.modules import layer_weights

PLAN = {"components": {"model": {"placement": "stream", "pinned": True}}}


class Registering(LoopbackDevice):
    """A card whose driver knows addresses, as CUDA's does: two ranges that overlap are refused."""

    plain_copies_block = True

    def __init__(self, most: int = 2**40) -> None:
        self.most = most  # bytes that may be locked
        self.ranges: dict[int, tuple[int, StorageWeakRef]] = {}
        self.died: list[int] = []  # bytes of what was freed before it was unlocked

    def copy_stream(self) -> CopyStream:
        return LateCopyStream()

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        begin, size = buffer.data_ptr(), buffer.nbytes
        if any(begin < at + length and at < begin + size for at, (length, _) in self.ranges.items()):
            return None
        if self.locked + size > self.most:
            return None
        storage = StorageWeakRef(buffer.untyped_storage())
        self.ranges[begin] = size, storage

        def unlock() -> None:
            if storage.expired():
                self.died.append(size)
            del self.ranges[begin]

        return unlock

    @property
    def locked(self) -> int:
        return sum(size for size, _ in self.ranges.values())

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether `weight` lies in memory that is locked and there."""
        return any(
            at <= weight.data_ptr() and weight.data_ptr() + weight.nbytes <= at + size and not storage.expired()
            for at, (size, storage) in self.ranges.items()
        )


class Layers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(512, 512) for _ in range(6)))


X = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))


def masters(model: nn.Module) -> list[nn.Parameter]:
    """What the model has where it rests, of its leaves."""
    layers = layer_weights(model)
    return [weight for weight in model.parameters() if id(weight) in layers]


def test_masters_that_were_cast_are_locked_again_and_nothing_dies_locked() -> None:
    model, plain, device = Layers(), Layers(), Registering()
    fitted = fit(model, plan=PLAN, device=device)
    usual = device.locked
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        for each in (model, plain):
            each.to(dtype)
        for _ in range(2):
            assert torch.equal(model(X.to(dtype)), plain(X.to(dtype)))
        assert device.locked == usual * dtype.itemsize // 4
        assert not any(storage.expired() for _, storage in device.ranges.values())
    assert not fitted.report().trace.notes
    fitted.undo()
    assert device.ranges == {}
    assert device.died == []


def test_masters_at_rest_lie_in_locked_memory() -> None:
    model, device = Layers(), Registering()
    fitted = fit(model, plan=PLAN, device=device)
    assert all(map(device.holds, masters(model)))
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        model(X.to(dtype))
        model.to(dtype)  # they are at home again
        assert all(map(device.holds, masters(model)))
    fitted.undo()
    assert not any(map(device.holds, masters(model)))


def test_undo_right_after_a_cast_leaves_nothing_locked() -> None:
    model, device = Layers(), Registering()
    fitted = fit(model, plan=PLAN, device=device)
    model(X)
    model.to(torch.float64)
    fitted.undo()
    assert (device.ranges, device.died) == ({}, [])


def test_whoever_forgets_to_undo_leaves_nothing_locked() -> None:
    model, device = Layers(), Registering()
    fit(model, plan=PLAN, device=device)
    model(X)
    assert device.locked
    del model
    gc.collect()
    assert (device.ranges, device.died) == ({}, [])


def test_a_lock_that_is_refused_after_a_cast_is_reported_and_asked_for_again() -> None:
    model, plain = Layers(), Layers()
    usual = sum(parameter.nbytes for parameter in model.parameters())
    device = Registering(most=usual * 3 // 2)
    fitted = fit(model, plan=PLAN, device=device)
    at_first = device.locked
    for dtype in (torch.float64, torch.float32):
        found: Any = model.to(dtype)(X.to(dtype))
        assert torch.equal(found, plain.to(dtype)(X.to(dtype)))
        notes = fitted.report().trace.notes
        assert [note for note in notes if "page-locking was refused" in note] == list(notes)
        assert bool(notes) == (dtype == torch.float64)
    assert device.locked == at_first
    fitted.undo()
    assert (device.ranges, device.died) == ({}, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_values_are_the_casts(dtype: torch.dtype) -> None:
    model, plain, device = Layers(), Layers(), Registering()
    fitted = fit(model, plan=PLAN, device=device)
    model(X)
    model.to(dtype)
    model(X.to(dtype))
    fitted.undo()
    plain.to(dtype)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
