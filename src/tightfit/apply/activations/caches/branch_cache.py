"""What every kind of step cache does for one guidance prediction of one network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.caches.conditions import SkipCondition
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_changes import StepChanges
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.schema.step_cache import StepCache

__all__ = ["BranchCache", "LeaveOut", "Work", "kept_bytes"]

Work = Callable[..., Any]  # a module's call, without the module
LeaveOut = Callable[[Iterable[nn.Module]], None]  # is told which modules the call in progress will not run


class BranchCache(ABC):
    """Keeps what one branch computed, and leaves out modules of the network in skipped steps."""

    def __init__(self, settings: StepCache, host_pool: ActivationHostPool | None, leave_out: LeaveOut) -> None:
        self.settings, self._host_pool, self._leave_out = settings, host_pool, leave_out
        self.condition = SkipCondition(settings)
        self.skips: bool | None = None  # whether the call in progress skips; None: not decided yet
        self.call: DenoiserCall | None = None  # the call in progress
        self.failed: str | None = None  # why nothing can be skipped
        self.remark: str | None = None  # why something is computed that might be left out
        self.skipped_last = False  # whether the last call skipped
        self.changes: StepChanges | None = None  # where changes are noted, of calls that skip nothing

    @property
    @abstractmethod
    def kept(self) -> Iterator[KeptTensors]:
        """All that is kept."""

    @property
    def able(self) -> bool:
        """Whether all that a skipped step needs is kept."""
        kept = list(self.kept)
        return self.failed is None and bool(kept) and all(each.known for each in kept)

    def foreseen(self, call: DenoiserCall) -> bool | None:
        """Whether `call`, the next one, skips; None if it depends on its tensors."""
        return self.condition.foreseen(call) if self.able else False

    @property
    @abstractmethod
    def skippable(self) -> tuple[nn.Module, ...]:
        """Modules that a skipped step leaves out."""

    def left_out_by(self, call: DenoiserCall) -> tuple[nn.Module, ...]:
        """Return what `call`, which comes after the one in progress, leaves out, as far as that is known by now."""
        if self.call is None:
            return self.skippable if self.foreseen(call) else ()
        if self.failed is not None or self.skips is None:
            return ()
        return self.skippable if self.condition.after(self.call, skipped=self.skips).foreseen(call) else ()

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        """Begin a call, of which `foreseen` has said whether it `skips`."""
        self.call, self.skips = call, skips
        if skips is not False or self.settings.value("order"):
            for kept in self.kept:
                kept.fetch()
        if skips is not None:
            self._decided()

    def decide(self, seen: Any) -> None:
        """Decide whether the call in progress skips, if it is not decided yet, by the tensor `seen`."""
        assert self.call is not None
        if self.skips is None:
            self.skips = self.condition.decide(self.call, seen)
            self._decided()
        elif self.changes is not None:
            self.changes.note_compared(self.call.step, self.condition.change_to(seen))
        self.condition.note(self.call, seen, skipped=self.skips)

    def _decided(self) -> None:
        """Do what can be done as soon as it is known whether the call skips."""
        if not self.skips:
            for kept in self.kept:
                kept.drop()

    def network(self, network: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of `network` in the call in progress; `work` is its forward pass."""
        return work(*args, **kwargs)

    @abstractmethod
    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `module`, one of those that may be left out or decide, returns in the call in progress."""

    def end(self) -> None:
        """End the call in progress."""
        assert self.call is not None
        if not self._compares:
            self.condition.note(self.call, None, skipped=bool(self.skips))
        if self.changes is not None:
            self.changes.note_reused(self.call.step, [each for kept in self.kept for each in kept.latest])
        for kept in self.kept:
            kept.settle()
        self.skipped_last, self.call = bool(self.skips), None

    def outlook(self, call: DenoiserCall) -> str:
        """Return the kind of `call`, the next one, on a simulated card, where thresholds decide nothing."""
        foreseen = self.foreseen(call)
        skips = self.condition.alternates(call) if foreseen is None else foreseen
        return ("skips" if skips else "runs") if self.able else "first"

    def repeat(self, call: DenoiserCall) -> None:
        """Note that `call` repeats one of the same kind, with the same effect on what is kept."""
        skips = self.outlook(call) == "skips"
        self.condition.note(call, None, skipped=skips)
        self.skipped_last = skips

    def fail(self, why: str) -> None:
        """Keep nothing any more, and skip nothing."""
        self.forget()
        self.failed = why

    def forget(self) -> None:
        """Free what is kept."""
        for kept in self.kept:
            kept.clear()

    @property
    def _compares(self) -> bool:
        return self.settings.kind.decides in ("first blocks", "modulated input", "filtered input", "output rate")

    @property
    def device_bytes(self) -> int:
        """Bytes that are kept on the device between calls, without `shared`."""
        return self.condition.device_bytes + sum(kept.device_bytes for kept in self.kept)

    @property
    def shared(self) -> Iterator[torch.Tensor]:
        """Tensors that are kept as the network was given them: other branches may keep the same ones."""
        return iter(())

    @property
    def host_bytes(self) -> int:
        """Bytes that are kept in host memory."""
        return sum(kept.host_bytes for kept in self.kept)


def kept_bytes(branches: Collection[BranchCache], given: Iterable[Any]) -> tuple[int, int]:
    """Return the bytes that `branches` keep on the device, beside what a call is `given` as it begins, and on the host.

    Memory that several of them keep counts once.
    """
    known = {_memory(each) for each in given if isinstance(each, torch.Tensor)}
    shared = {_memory(each): each.untyped_storage().nbytes() for one in branches for each in one.shared}
    device = sum(one.device_bytes for one in branches) + sum(shared[key] for key in shared.keys() - known)
    return device, sum(one.host_bytes for one in branches)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
