"""Tensors whose values come later: what may be done with them before, and what gets the values first."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tightfit import RunError
from tightfit.apply.context_parallel.deferred_tensor import DeferredOutput, DeferredTensor

VALUES = torch.arange(24.0).reshape(2, 3, 4)


class Promise:
    """A deferred tensor with VALUES, and how often it was read early."""

    def __init__(self, filled: bool = True) -> None:
        self.reads = 0
        self._filled = filled
        self.output = DeferredOutput([VALUES.to("meta")], VALUES.device, self._read)
        (self.tensor,) = self.output.tensors

    def _read(self) -> None:
        self.reads += 1
        if self._filled:
            self.fill()

    def fill(self) -> None:
        self.output.fill([VALUES.clone()])


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x[0],
    lambda x: x[:, 1:, ::2],
    lambda x: x.transpose(0, 2).unsqueeze(0),
    lambda x: x.flatten(),
    lambda x: x.chunk(2, dim=2)[1],
    lambda x: x.to(torch.float64)[0],
    lambda x: -x.half(),
    lambda x: x.permute(2, 0, 1).contiguous(),
    lambda x: next(iter(x.unbind(1))),
    lambda x: x.detach().squeeze(),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_copies_wait_for_the_values(view: Callable[[Any], Any], mode: Any) -> None:
    with mode():
        promise = Promise()
        taken = view(promise.tensor)
        assert promise.reads == 0
        expected = view(VALUES.clone())
        assert (taken.shape, taken.stride(), taken.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert taken.device == expected.device
        promise.fill()
        assert type(taken) is torch.Tensor
        assert type(promise.tensor) is torch.Tensor
        assert torch.equal(taken, expected)
        assert torch.equal(promise.tensor, VALUES)
        assert promise.reads == 0


def test_views_share_memory_with_what_they_are_views_of() -> None:
    promise = Promise()
    row, copied = promise.tensor[0], promise.tensor.clone()
    promise.fill()
    row.mul_(2)
    assert torch.equal(promise.tensor[0], 2 * VALUES[0])
    assert torch.equal(copied, VALUES)


READS: list[Callable[[Any], Any]] = [
    lambda x: (x + 1).sum(),
    lambda x: 2 * x[0].mean(),
    lambda x: torch.cat([x, x]).sum(),
    lambda x: torch.stack([torch.ones_like(VALUES), x]).sum(),
    lambda x: x.double().sum().item(),
    lambda x: bool(x.isnan().any()),
    lambda x: x.tolist(),
    lambda x: x.numpy().sum(),
    lambda x: np.asarray(x).sum(),
    lambda x: x[1].numpy().sum(),
    lambda x: torch.from_dlpack(x).sum(),
    lambda x: copy.deepcopy(x).sum(),
    repr,
    lambda x: torch.nn.functional.silu(x, inplace=True).sum(),
    lambda x: torch.einsum("abc,abd->cd", x, x).sum(),
    lambda x: VALUES.clone().copy_(x).sum(),
    lambda x: torch.where(x > 3, x, 0).sum(),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("read", READS)
def test_what_reads_a_tensor_gets_its_values(read: Callable[[Any], Any], mode: Any) -> None:
    with mode():
        promise = Promise()
        found, expected = read(promise.tensor), read(VALUES.clone())
        assert promise.reads == 1
        assert str(found) == str(expected)
        assert not isinstance(found, DeferredTensor)


def test_memory_has_an_address_only_with_values() -> None:
    promise = Promise()
    address = promise.tensor.data_ptr()
    assert promise.reads == 1
    assert address == promise.tensor.data_ptr() != 0


def test_what_is_written_early_is_there_later() -> None:
    promise = Promise()
    row = promise.tensor[0]
    promise.tensor.mul_(3)
    promise.tensor[..., 0] = -1
    expected = 3 * VALUES
    expected[..., 0] = -1
    assert promise.reads == 1
    assert torch.equal(promise.tensor + 0, expected)
    assert torch.equal(row + 0, expected[0])


def test_a_tensor_of_a_failed_call_cannot_be_read() -> None:
    promise = Promise(filled=False)
    with pytest.raises(RunError, match="1 tensors of a network's output have no values: its call failed"):
        promise.tensor.sum()


def test_another_thread_cannot_read_early() -> None:
    promise, errors = Promise(), list[Exception]()

    def read() -> None:
        try:
            promise.tensor.sum()
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    (error,) = errors
    assert "were read in another thread than the pipeline's" in str(error)
    assert promise.reads == 0


def test_a_shape_cannot_be_changed_in_place() -> None:
    with pytest.raises(RunError, match="changes the shape of a network's output in place"):
        Promise().tensor.unsqueeze_(0)
