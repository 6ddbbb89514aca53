"""The offloaders of the devices over which one network is split, as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.apply.weights.weight_offloader import WeightOffloader

__all__ = ["PartOffloaders"]


@dataclass(frozen=True)
class PartOffloaders:
    """The offloaders of the devices on which parts of one network compute, as one: see `WeightOffloader`."""

    every: tuple[WeightOffloader, ...]

    @property
    def backward(self) -> PartOffloaders:
        """What its passes with gradients are run by."""
        return self

    @contextlib.contextmanager
    def differentiated(self, name: str) -> Iterator[None]:
        """Run `name` with gradients enabled in this context."""
        with contextlib.ExitStack() as stack:
            for each in self.every:
                stack.enter_context(each.backward.differentiated(name))
            yield

    def keep_within(self, name: str | None) -> int:
        return max(each.keep_within(name) for each in self.every)

    def evict_others(self, name: str) -> None:
        for each in self.every:
            each.evict_others(name)

    def load(self, name: str, method: str = "forward") -> None:
        for each in self.every:
            each.load(name, method)

    def enter(self, name: str) -> None:
        for each in self.every:
            each.enter(name)

    def finish(self, name: str) -> None:
        for each in self.every:
            each.finish(name)

    def free_memory(self, name: str, where: str) -> bool:
        """Evict some weights on each device: which of them ran out is not known here."""
        freed = [each.free_memory(name, where) for each in self.every]
        return any(freed)

    def dismiss(self, name: str) -> None:
        for each in self.every:
            each.dismiss(name)
