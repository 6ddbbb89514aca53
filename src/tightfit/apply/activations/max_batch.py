"""A batch denoised a few items at a time, so that only their activations exist at once.

Arguments belong to items if their first dimension, in whatever nesting of lists and dicts, counts items, or frames of
all items (AnimateDiff's prompts). Position tables are the same for all items; they are recognized by name, because they
may have as many rows by chance. Where a network may mix items (with a custom attention processor, say), the batch stays
whole, and this is reported.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.outputs import combine
from tightfit.apply.method_overrides import override_class_members
from tightfit.errors import RunError
from tightfit.measure.modules import compiled_around, find_blocks

__all__ = [
    "PLAIN",
    "Batch",
    "chunk_blocks",
    "cut_items",
    "find_batch",
    "in_chunks",
    "laid_out_as",
    "why_coupled",
    "why_not_split",
]

TABLES = re.compile(r"img_ids|txt_ids|rotary|rope|freqs|indices")  # names of position tables, of 1 or 2 dimensions
AXES = 4  # most axes of a position: (positions, 3) is a table, (items, tokens) is not
PLAIN = (torch.Tensor, bool, int, float, complex, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Batch:
    """The batch of one network call: `count` items, of `frames` frames each for a video."""

    first: torch.Tensor  # first argument of the call: (items, …)
    names: tuple[str, ...]  # names of the positional arguments
    count: int
    frames: int

    def place(self, name: str, value: torch.Tensor) -> tuple[int, int] | None:
        """Return the dimension of the argument `name` that holds the items, and the rows per item in it.

        None: the argument is the same for all items.
        """
        if value.ndim == 0 or _is_table(name, value):
            return None
        if len(value) == self.count:
            return 0, 1
        if len(value) == self.count * self.frames:
            return 0, self.frames
        if value.ndim >= 4 and len(value) != 1 and value.shape[1] == self.count:  # (layers, items, tokens, width)
            return 1, 1
        return None

    def map(self, act: Act, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return `args` and `kwargs` with `act(value, dim, rows)` applied to each argument of the items (`place`)."""
        names = (*self.names, *map(str, range(len(self.names), len(args))))
        return (
            [self._map(act, name, value) for name, value in zip(names, args, strict=True)],
            {name: self._map(act, name, value) for name, value in kwargs.items()},
        )

    def _map(self, act: Act, name: str, value: Any) -> Any:
        match value:
            case torch.Tensor():
                place = self.place(name, value)
                return value if place is None else act(value, *place)
            case list() if len(value) == self.count and all(map(_of_numbers, value)):  # sizes of each item
                return act(value, 0, 1)
            case list():
                return [self._map(act, name, part) for part in value]
            case tuple():
                parts = (self._map(act, name, part) for part in value)
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            case dict():
                return {key: self._map(act, f"{name}.{key}", part) for key, part in value.items()}
        return value


Act = Callable[[Any, int, int], Any]


def find_batch(network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Batch | None:
    """Return the batch of a call of `network`; None if its first argument is no tensor of three or more dimensions."""
    names = tuple(inspect.signature(type(network).forward).parameters)[1:]
    first = args[0] if args else kwargs.get(names[0] if names else "")
    if not isinstance(first, torch.Tensor) or first.ndim < 3:
        return None
    return Batch(first, names[: len(args)], len(first), first.shape[2] if first.ndim == 5 else 1)


def why_not_split(network: nn.Module, batch: Batch, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the reason why `batch` cannot be split into items in this call of `network`; None: it can."""
    return _why_unknown(batch, args, kwargs) or why_coupled(network)


def _why_unknown(batch: Batch, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    both = (batch.count, batch.count)
    for value in tree_leaves((args, kwargs)):
        if not isinstance(value, PLAIN):
            return f"it is given a {type(value).__name__}, which cannot be split"
        if isinstance(value, torch.Tensor) and value.ndim >= 4 and value.shape[:2] == both and value is not batch.first:
            return f"items may lie along either of the first two dimensions of a tensor of {tuple(value.shape)}"
    return None


def why_coupled(network: nn.Module) -> str | None:
    """Return the reason why `network` may do other things with one item than with several; None: it does not."""
    left: list[nn.Module | None] = [network]
    while left:  # before each call: several times faster than `network.modules()`
        module = left.pop()
        if module is None:
            continue
        own = vars(module)
        if getattr(own.get("_diffusers_hook"), "hooks", None):
            return "hooks of diffusers keep what they saw from call to call"
        if "processor" in own or "processor" in module._modules or hasattr(type(module), "processor"):
            kind = type(getattr(module, "processor", None))
            known = kind is type(None) or kind.__module__.startswith("diffusers.models.")
            if not known or "PAG" in kind.__name__:
                return f"its attention processor {kind.__name__} may look at several items at once"
        left.extend(module._modules.values())
    return None


def in_chunks(
    forward: Callable[..., Any], size: int | None, note: Callable[[str], object] = lambda what: None
) -> Callable[..., Any]:
    """Wrap `forward` (network first) to run on at most `size` items of the batch at a time; None: on half of it.

    Returns what `forward` returns (tensors, tuples, diffusers' outputs); each tensor is written into one of the whole
    batch. `note` is called with a sentence where a batch stays whole.
    """

    @functools.wraps(forward)
    def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch = find_batch(network, args, kwargs)
        most = _most(batch, size)
        if batch is None or batch.count <= most:
            return forward(network, *args, **kwargs)
        reason = why_not_split(network, batch, args, kwargs)
        if reason is not None:
            note(_whole(batch, reason))
            return forward(network, *args, **kwargs)
        return _run_chunks(functools.partial(forward, network), batch, most, args, kwargs)

    return run


def chunk_blocks(
    network: nn.Module, size: int | None, undo: ExitStack, note: Callable[[str], object] = lambda what: None
) -> None:
    """Run each block of `network` on at most `size` items of the batch at a time; None: on half of it.

    All items pass through a block before the next one begins: its weights are loaded once, whatever the number of
    items, and the activations between blocks are those of all items. Compiled modules are left unchanged.
    """
    if network._compiled_call_impl is not None:
        return
    items = 0  # in the batch of the current call; 0: it is not split

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal items
        batch = find_batch(network, args, kwargs)
        if batch is None or batch.count <= _most(batch, size):
            items = 0
            return
        reason = why_not_split(network, batch, args, kwargs)
        items = 0 if reason else batch.count
        if reason:
            note(_whole(batch, reason))

    def in_turn(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = find_batch(block, args, kwargs)
            if given is None or not items or given.count % items:
                return forward(block, *args, **kwargs)
            batch = replace(given, count=items, frames=given.count // items)
            if _why_unknown(batch, args, kwargs):
                return forward(block, *args, **kwargs)
            return _run_chunks(functools.partial(forward, block), batch, _most(batch, size), args, kwargs)

        return run

    undo.callback(network.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
    compiled = compiled_around(network)
    for block in find_blocks(network).values():
        if id(block) not in compiled:
            undo.callback(override_class_members(block, forward=in_turn(type(block).forward)))


def _run_chunks(
    forward: Callable[..., Any], batch: Batch, size: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    whole = None
    for start in range(0, batch.count, size):
        items = range(start, min(start + size, batch.count))
        some_args, some_kwargs = batch.map(functools.partial(cut_items, items), args, kwargs)
        whole = _with(whole, forward(*some_args, **some_kwargs), items, batch.count)
    return whole


def _most(batch: Batch | None, size: int | None) -> int:
    """Maximum number of items at a time."""
    return size or (-(-batch.count // 2) if batch else 1)


def _whole(batch: Batch, reason: str) -> str:
    return f"a batch of {batch.count} was denoised as a whole: {reason}"


def _is_table(name: str, value: torch.Tensor) -> bool:
    """Whether each row holds a position, or values computed from one."""
    of_positions = value.ndim == 2 and name.endswith("position_ids") and value.shape[1] <= AXES
    return of_positions or (value.ndim <= 2 and TABLES.search(name) is not None)


def cut_items(items: range, value: Any, dim: int, rows: int) -> Any:
    """Return the rows of `items` of an argument that belongs to items, as `Batch.map` passes it."""
    part = slice(items.start * rows, items.stop * rows)
    return value[:, part] if dim else value[part]


def _with(whole: Any, part: Any, items: range, count: int) -> Any:
    """Write `part`, the output of `items`, into `whole`, that of all `count` items (None: allocate it); return it."""

    def room(made: list[torch.Tensor]) -> torch.Tensor:
        (tensor,) = made
        if tensor.ndim == 0 or len(tensor) % len(items):
            shape = tuple(tensor.shape)
            raise RunError(f"{len(items)} items gave a tensor of {shape}: this network takes its batches whole")
        return laid_out_as(tensor, len(tensor) // len(items) * count)

    def write(pair: list[torch.Tensor]) -> torch.Tensor:
        target, source = pair
        rows = len(target) // count
        target[items.start * rows : items.stop * rows] = source
        return target

    return combine([combine([part], room) if whole is None else whole, part], write)


def laid_out_as(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Allocate `rows` rows with `tensor`'s order of strides, so that the next kernel gives the same bits."""
    before, sizes = tensor.stride(), (rows, *tensor.shape[1:])
    strides, step = [0] * tensor.ndim, 1
    for dim in sorted(range(tensor.ndim), key=lambda dim: (before[dim], -dim)):
        strides[dim], step = step, step * sizes[dim]
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def _of_numbers(value: Any) -> bool:
    """Whether it is a list or tuple of numbers, possibly nested."""
    leaves = tree_leaves(value)
    return isinstance(value, list | tuple) and all(isinstance(leaf, int | float) for leaf in leaves)
