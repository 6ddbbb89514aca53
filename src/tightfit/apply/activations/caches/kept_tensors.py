"""What a step cache keeps: tensors of earlier steps, on the device or in host memory, and predictions from them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from tightfit.devices.pinned_pool import ActivationHostPool, HostTape, HostTransfer, bytes_of, is_dense

__all__ = ["KeptTensors"]


class KeptTensors:
    """A value (several tensors) of the last steps that ran, with its finite differences up to an order.

    Differences are those per step, or with `per_step=False` the whole change since the value before.

    With a `host_pool`, the tensors wait in host memory: `fetch` starts to copy them back, which `predicted` waits for.
    """

    def __init__(self, order: int = 0, host_pool: ActivationHostPool | None = None, *, per_step: bool = True) -> None:
        self._order, self._host_pool, self._per_step = order, host_pool, per_step
        self._step: int | None = None  # of the last value
        self._factors: list[list[_Waiting]] = []  # of each order, from 0 on; a tensor for each of the value

    @property
    def known(self) -> bool:
        """Whether there is a value, which nobody has written into since."""
        return bool(self._factors) and all(each.unchanged for each in self._all)

    @property
    def latest(self) -> list[torch.Tensor]:
        """The value that was kept last, on the device."""
        return [each.tensor() for each in self._factors[0]] if self._factors else []

    @property
    def device_bytes(self) -> int:
        """Bytes that are kept on the device between steps."""
        return sum(each.nbytes for each in self._all if not each.in_host_memory)

    @property
    def host_bytes(self) -> int:
        """Bytes that are kept in host memory."""
        return sum(each.nbytes for each in self._all if each.in_host_memory)

    @property
    def _all(self) -> Iterator[_Waiting]:
        return itertools.chain.from_iterable(self._factors)

    def clear(self) -> None:
        """Forget the value; other copies to and from its host memory come after its own."""
        for each in self._all:
            each.settle()
        self._factors, self._step = [], None

    def drop(self) -> None:
        """Free what the next value does not need, just before it is computed: all of it without differences."""
        if not self._order:
            self.clear()

    def fetch(self) -> None:
        """Start to bring all tensors to the device."""
        for each in self._all:
            each.fetch()

    def settle(self) -> None:
        """Free the device memory of what was sent to host memory."""
        for each in self._all:
            each.settle()

    def keep(self, value: Sequence[torch.Tensor], step: int) -> None:
        """Keep `value`, computed in `step`, with its differences to the values before."""
        factors = [_without_rest(value) if self._host_pool is None else list(value)]
        if self._step is not None and step > self._step:
            for before in self._factors[: self._order]:
                passed = step - self._step if self._per_step else 1
                factors.append([(new - old.tensor()) / passed for new, old in zip(factors[-1], before, strict=True)])
        self._step = step
        self._factors = [[_Waiting(each, self._host_pool) for each in some] for some in factors]

    def predicted(
        self, step: int, onto: Sequence[torch.Tensor] | None = None, *, passed: float | None = None
    ) -> list[torch.Tensor]:
        """Return the value predicted for `step`, added to the tensors `onto` if they are given.

        `passed` is the argument of the series, if it is not the number of steps since the last value.
        """
        assert self._step is not None
        passed = step - self._step if passed is None else passed
        first = [each.tensor() for each in self._factors[0]]
        if onto is None:  # who gets it must not write into what is kept
            result = [each.clone() if each.is_inference() else each for each in first]
        else:
            result = [given + kept for given, kept in zip(onto, first, strict=True)]
        for order, factors in enumerate(self._factors[1:], start=1):
            weight = passed**order / math.factorial(order)
            if order == 1 and onto is None:
                result = [
                    torch.add(given, each.tensor(), alpha=weight) for given, each in zip(result, factors, strict=True)
                ]
            else:
                for given, each in zip(result, factors, strict=True):
                    given.add_(each.tensor(), alpha=weight)
        for each in self._all:
            each.release()
        return result


def _without_rest(value: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `value`, with copies of tensors that are views of memory which is not all part of `value`."""
    used = Counter[int]()
    for each in value:
        used[each.untyped_storage()._cdata] += each.nbytes
    return [
        each if used[each.untyped_storage()._cdata] >= each.untyped_storage().nbytes() else each.clone()
        for each in value
    ]


class _Waiting:
    """One kept tensor: on the device, or in host memory and on the device only from `fetch` to `release`."""

    def __init__(self, tensor: torch.Tensor, host_pool: ActivationHostPool | None) -> None:
        self.nbytes = tensor.nbytes
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = None if tensor.is_inference() else self._tensor._version
        self._tape: HostTape | None = None
        self._coming: HostTransfer | None = None
        if host_pool is not None:
            dense = tensor if is_dense(tensor) else tensor.contiguous()
            self._shape, self._strides, self._dtype = dense.shape, dense.stride(), dense.dtype
            self._host_pool = host_pool
            self._tape = host_pool.tape(dense.nbytes)
            self._tape.write(bytes_of(dense))
            self._tensor = None

    @property
    def in_host_memory(self) -> bool:
        return self._tape is not None

    @property
    def unchanged(self) -> bool:
        """Whether it still is what was kept: what is in host memory always is."""
        return self._tensor is None or self._tape is not None or self._version in (None, self._tensor._version)

    def settle(self) -> None:
        """Make the compute stream wait for its copies; if its place is host memory, it is there alone then."""
        if self._tape is not None:
            self._tape.sent()
            if self._coming is not None:
                self._coming.settle()
            self._coming = self._tensor = None

    def fetch(self) -> None:
        if self._tensor is None and self._tape is not None:
            self._tensor = torch.empty_strided(
                self._shape, self._strides, dtype=self._dtype, device=self._host_pool.place
            )
            self._coming = self._tape.read(0, bytes_of(self._tensor))

    def tensor(self) -> torch.Tensor:
        """Return it on the device."""
        self.fetch()
        if self._coming is not None:
            self._coming.settle()
            self._coming = None
        assert self._tensor is not None
        return self._tensor

    def release(self) -> None:
        if self._tape is not None:
            self._tensor = None
