"""What autograd needs of weights that are loaded and evicted: where gradients go, and what stands for saved weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tightfit.apply.weights.loaded_group import LoadedGroup, Seen
from tightfit.apply.weights.weight_groups import Table, WeightGroup
from tightfit.apply.weights.weight_store import plain_parts, rebuilt
from tightfit.errors import RunError
from tightfit.simulator.backward import ORDERLESS, SavedTensor

__all__ = ["Links", "SavedWeight", "SavedWeights", "current_task", "in_backward", "within_checkpoint"]

Fetch = Callable[[WeightGroup], LoadedGroup]
# no public name; torch.utils.checkpoint uses `_current_graph_task_id`, which has none either
_outer_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def current_task() -> int:
    """Return the id of this thread's backward pass; -1: it runs none."""
    return int(torch._C._current_graph_task_id())  # simulated cards replace it


def in_backward() -> bool:
    """Whether this thread runs a backward pass now."""
    return current_task() != -1


def within_checkpoint() -> bool:
    """Whether other code takes what autograd saves, as torch.utils.checkpoint does, which counts it in order."""
    return torch.is_grad_enabled() and not _is_own(_outer_hooks(True))


def _is_own(hooks: Any) -> bool:
    """Whether all that is saved goes to hooks that know no order: there are none, or they are from here."""
    return hooks is None or getattr(hooks[0], ORDERLESS, False)


class _Link(torch.autograd.Function):
    """Makes a loaded weight a function of its source parameter, which gets the gradient, on its own device."""

    @staticmethod
    def forward(ctx: Any, source_param: torch.Tensor, loaded: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.device = source_param.device
        return loaded[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.device), None


class Links:
    """Loaded weights as functions of their source parameters, in the modules that use them, until `undo`."""

    def __init__(self) -> None:
        self._links: list[tuple[Table, str, torch.Tensor, torch.Tensor]] = []  # with the weight and the function

    def add(self, source_param: torch.Tensor, seen: Sequence[Seen]) -> None:
        """Link the weight that modules see (`seen`) to `source_param`, if this requires a gradient."""
        if not seen:
            return
        weight = seen[0][2]
        if not source_param.requires_grad:  # other code may have frozen it since it was loaded
            weight.requires_grad_(False)
            return
        function: torch.Tensor = _Link.apply(source_param, [weight])  # type: ignore[no-untyped-call]
        for table, name, _ in seen:
            table[name] = function
            self._links.append((table, name, weight, function))

    def undo(self) -> None:
        """Put the weights back, where other code has put nothing else."""
        while self._links:
            table, name, weight, function = self._links.pop()
            if table.get(name) is function:
                table[name] = weight


@dataclass(frozen=True)
class _Part:
    """A plain tensor within the memory of a loaded group."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int  # bytes

    def within(self, region: torch.Tensor) -> torch.Tensor:
        item = self.dtype.itemsize
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        span = region[self.offset : self.offset + (last + 1) * item].view(self.dtype)
        return span.as_strided(self.shape, self.strides, span.storage_offset())


@dataclass(frozen=True)
class SavedWeight:
    """Stands for a weight, or a view of one, that autograd saved: its memory may be overwritten after the layer."""

    group: WeightGroup
    like: torch.Tensor | None  # a tensor subclass, on "meta", that consists of the parts
    parts: tuple[_Part, ...]
    version: int

    def restored(self, fetch: Fetch) -> torch.Tensor:
        """Return the weight, loaded again. Raises RunError if it was changed since."""
        if _version(self.group) != self.version:
            raise RunError(
                f"weights of {self.group.name} were changed between a forward pass and its backward pass, which needs "
                "the old ones: call backward() first, then change them"
            )
        parts = [part.within(fetch(self.group).region) for part in self.parts]
        return parts[0] if self.like is None else rebuilt(self.like, parts)


class SavedWeights(saved_tensors_hooks):
    """Context in which autograd saves references to the weights of `groups`, which `fetch` loads again.

    All other tensors are saved as outside of it, for example by torch.utils.checkpoint.
    """

    def __init__(self, groups: Iterable[LoadedGroup], fetch: Fetch) -> None:
        known, packed, outer = list(groups), list[bool](), _outer_hooks(True)
        self._packed = packed  # `pack` must not refer to `self`, which refers to it: what it keeps would stay too long
        self._known = known  # until the end of the context: autograd keeps `pack` for as long as what it has packed

        def pack(tensor: torch.Tensor) -> Any:
            packed[:] = [True]
            saved = _reference(tensor, known)
            if saved is not None:
                return saved
            return SavedTensor.of(tensor) if outer is None else outer[0](tensor)

        setattr(pack, ORDERLESS, _is_own(outer))

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, SavedWeight):
                return saved.restored(fetch)
            if isinstance(saved, SavedTensor):
                return saved.restored()
            found: torch.Tensor = outer[1](saved)
            return found

        super().__init__(pack, unpack)

    @property
    def used(self) -> bool:
        """Whether autograd saved anything."""
        return bool(self._packed)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._known.clear()


def _reference(tensor: torch.Tensor, groups: Sequence[LoadedGroup]) -> SavedWeight | None:
    """Return what stands for `tensor` if all its memory is that of one of `groups`."""
    plain = plain_parts(tensor)
    for here in groups:
        parts = [part for part in (_located(each, here.region) for each in plain) if part is not None]
        if len(parts) == len(plain):
            like = None if plain[0] is tensor else rebuilt(tensor, [part.to("meta") for part in plain])
            return SavedWeight(here.group, like, tuple(parts), _version(here.group))
    return None


def _located(tensor: torch.Tensor, region: torch.Tensor) -> _Part | None:
    if tensor.layout is not torch.strided or tensor.is_meta != region.is_meta:
        return None
    if tensor.untyped_storage()._cdata != region.untyped_storage()._cdata:
        return None
    offset = int(tensor.storage_offset()) * tensor.itemsize - int(region.storage_offset())
    if 0 <= offset < region.nbytes and tensor.numel():
        return _Part(tensor.dtype, tensor.shape, tensor.stride(), offset)
    return None


def _version(group: WeightGroup) -> int:
    return sum(part._version for source_param in group.source_params for part in plain_parts(source_param))
