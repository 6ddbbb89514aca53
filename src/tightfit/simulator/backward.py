"""Backward passes on a simulated card, node by node.

torch's engine runs the nodes of a device in a thread of that device, and asks the process's accelerator for its
streams. A simulated card is not that accelerator (see backend.py), and the engine refuses it. So its nodes run here, in
the order of torch's engine: the last made first. Hooks on tensors that are no leaves, and on nodes, are not called.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

__all__ = ["ORDERLESS", "BackwardEngine", "ReleasedSaves", "SavedTensor", "follow_nodes", "offer_backward"]

ORDERLESS = "tightfit_orderless"  # attribute of hooks for saved tensors that take any number of them, in any order

Edge = tuple[Any, int]  # a node, and which of its inputs
Output = torch.Tensor | GradientEdge
_variable: Any = torch.autograd.Variable
_graph_tasks = itertools.count(2**40)  # ids of backward passes, other than those of torch's engine


class SavedTensor(NamedTuple):
    """A tensor that autograd saved, detached: an output with its graph would be a cycle."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        return cls(tensor.detach(), tensor._version)

    def restored(self) -> torch.Tensor:
        """Return the tensor. RuntimeError, as from torch, if it was changed since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} of {tuple(self.tensor.shape)}, at version {self.tensor._version} instead of "
                f"{self.version}"
            )
        return self.tensor


class ReleasedSaves(saved_tensors_hooks):
    """Context in which what autograd saves is freed by the node that used it, as torch's engine does."""

    _used: list[list[SavedTensor]] | None = None  # what the running node has unpacked; None: no pass runs

    def __init__(self) -> None:
        def pack(tensor: torch.Tensor) -> list[SavedTensor]:
            return [SavedTensor.of(tensor)]

        setattr(pack, ORDERLESS, True)

        def unpack(held: list[SavedTensor]) -> torch.Tensor:
            if not held:
                raise RuntimeError("Trying to backward through the graph a second time: use retain_graph=True")
            if ReleasedSaves._used is not None:
                ReleasedSaves._used.append(held)
            return held[0].restored()

        super().__init__(pack, unpack)


class BackwardEngine:
    """Stands for torch's engine, `torchs`, which gets all that is not on the device type `device_type`."""

    def __init__(self, torchs: Any, device_type: str) -> None:
        self.torchs, self._device_type = torchs, device_type
        self._torchs_task: Callable[[], int] = torch._C._current_graph_task_id
        self.node_callbacks: list[Callable[[int], object]] = []  # called before each node, with its sequence number
        self._running: list[tuple[int, list[Callable[[], object]]]] = []  # id and callbacks, the innermost pass last

    def current_task(self) -> int:
        """Return the id of the running backward pass; -1 if there is none."""
        return self._running[-1][0] if self._running else self._torchs_task()

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` at the end of the running backward pass."""
        if self._running:
            self._running[-1][1].append(callback)
        else:
            self.torchs.queue_callback(callback)

    def run_backward(
        self,
        outputs: Sequence[Output],
        gradients: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Output] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """Run a backward pass; arguments and result are those of torch's engine."""
        if all(_device_of(output).type != self._device_type for output in outputs):
            options = {"allow_unreachable": allow_unreachable, "accumulate_grad": accumulate_grad}
            return self.torchs.run_backward(outputs, gradients, keep_graph, create_graph, inputs, **options)
        callbacks: list[Callable[[], object]] = []
        self._running.append((next(_graph_tasks), callbacks))
        try:
            with torch.set_grad_enabled(create_graph):
                one = _BackwardPass(
                    [_edge(each) for each in inputs],
                    accumulate=accumulate_grad,
                    keeps=keep_graph,
                    callbacks=self.node_callbacks,
                )
                found = one.run([_edge(each) for each in outputs], gradients)
                for callback in callbacks:
                    callback()
        finally:
            self._running.pop()
        if any(each is None for each in found) and not allow_unreachable:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(found)


class _BackwardPass:
    """One backward pass: gradients on their way to nodes. Without `wanted`, all leaves accumulate theirs."""

    def __init__(
        self, wanted: Sequence[Edge], *, accumulate: bool, keeps: bool, callbacks: Sequence[Callable[[int], object]]
    ) -> None:
        self._wanted, self._accumulates, self._keeps = list(wanted), accumulate, keeps
        self._callbacks = callbacks
        self._given: dict[Any, list[torch.Tensor | None]] = {}  # gradients so far, by node
        self._found: dict[Edge, torch.Tensor] = {}
        self._ready: list[tuple[int, int, Any]] = []
        self._count = itertools.count()

    def run(self, roots: Sequence[Edge], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        missing = self._uses(dict.fromkeys(node for node, _ in roots))
        for edge, gradient in zip(roots, gradients, strict=True):
            self._give(edge, gradient)
        self._make_ready(node for node, count in missing.items() if not count)
        while self._ready:
            node = heapq.heappop(self._ready)[2]
            results = self._results_of(node, goes_on=any(other in missing for other, _ in node.next_functions))
            for (other, place), gradient in zip(node.next_functions, results, strict=False):
                if other in missing:
                    self._give((other, place), gradient)
                    missing[other] -= 1
                    self._make_ready([other] if not missing[other] else [])
        return [self._found.get(edge) for edge in self._wanted if not self._accumulates]

    def _uses(self, roots: Collection[Any]) -> dict[Any, int]:
        """Return how many gradients each node gets, of those between the roots and what is wanted."""
        waiting, order = list(roots), dict.fromkeys(roots)
        while waiting:
            for other, _ in waiting.pop().next_functions:
                if other is not None and other not in order:
                    order[other] = None
                    waiting.append(other)
        needed = {node for node, _ in self._wanted} or set(order)
        oldest_first = sorted(order, key=lambda node: _age(node) if node.next_functions else -1)
        for node in oldest_first:  # so each comes after all that it sends gradients to
            if any(other in needed for other, _ in node.next_functions):
                needed.add(node)
        uses = {node: 0 for node in order if node in needed}
        for node in uses:
            for other, _ in node.next_functions:
                if other in uses:
                    uses[other] += 1
        return uses

    def _make_ready(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            heapq.heappush(self._ready, (-_age(node), next(self._count), node))

    def _give(self, edge: Edge, gradient: torch.Tensor | None) -> None:
        node, place = edge
        given = self._given.setdefault(node, [None] * len(node._input_metadata))
        if gradient is not None:
            gradient = _fitting(gradient, node._input_metadata[place])
            before = given[place]
            given[place] = gradient if before is None else before + gradient

    def _results_of(self, node: Any, *, goes_on: bool) -> Sequence[torch.Tensor | None]:
        given = self._given.pop(node)
        for place, gradient in enumerate(given):
            if gradient is not None and (node, place) in self._wanted and not self._accumulates:
                self._found[node, place] = gradient
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if given[0] is not None and self._accumulates:
                _accumulate(leaf, given[0])
            return ()
        if not goes_on or all(gradient is None for gradient in given):
            return [None] * len(node.next_functions)
        for callback in self._callbacks:
            callback(_age(node))
        before, ReleasedSaves._used = ReleasedSaves._used, []
        try:
            results = node.apply(*given) if hasattr(node, "apply") else node(*given)
            for held in ReleasedSaves._used if not self._keeps else ():
                held.clear()
        finally:
            ReleasedSaves._used = before
        return results if isinstance(results, tuple) else (results,)


def _age(node: Any) -> int:
    """When a node was made: its sequence number; a leaf's is the highest there is."""
    return int(node._sequence_nr())


def _fitting(gradient: torch.Tensor, like: Any) -> torch.Tensor:
    """Return `gradient` with the shape and dtype of what it is of: nodes leave broadcasting to the engine."""
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(tuple(like.shape))
    return gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    for hook in (leaf._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if leaf.grad is None:
        leaf.grad = gradient if torch.is_grad_enabled() else gradient.detach()
    elif torch.is_grad_enabled():
        leaf.grad = leaf.grad + gradient
    else:
        leaf.grad.add_(gradient)
    for after in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
        after(leaf)


def _edge(of: Output) -> Edge:
    edge = of if isinstance(of, GradientEdge) else get_gradient_edge(of)
    return edge.node, edge.output_nr


def _device_of(output: Output) -> torch.device:
    if isinstance(output, torch.Tensor):
        return output.device
    found: torch.device = output.node._input_metadata[output.output_nr].device
    return found


def follow_nodes(callback: Callable[[int], object], undo: ExitStack) -> None:
    """Call `callback` with the sequence number of each node before it runs on a simulated card, until `undo` closes."""
    callbacks = _variable._execution_engine.node_callbacks
    callbacks.append(callback)
    undo.callback(callbacks.remove, callback)


def offer_backward(device_type: str, *, offered: bool) -> None:
    """Run backward passes on `device_type` from now on, or restore torch's own engine."""
    now = _variable._execution_engine
    if isinstance(now, BackwardEngine) == offered:
        return
    if offered:
        engine = BackwardEngine(now, device_type)
        _variable._execution_engine, torch._C._current_graph_task_id = engine, engine.current_task
    else:
        _variable._execution_engine, torch._C._current_graph_task_id = now.torchs, now._torchs_task
