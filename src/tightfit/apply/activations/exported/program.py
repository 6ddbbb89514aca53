"""Execution of an exported network, operation by operation, on the weights of the live network."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from tightfit.apply import module_hooks as gates
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.graph import filled, ready, steps_of
from tightfit.apply.activations.exported.signature import by_name, check_call, check_marks, check_plain
from tightfit.errors import ModelError, RunError

__all__ = ["ExportedCallable", "ExportedNetwork", "exported_forward"]

Weight = Callable[[int], torch.Tensor]
Chain = tuple[nn.Module, ...]  # a module and its ancestors, outermost first, without the network itself


class ExportedCallable(Protocol):
    """Runs an exported network."""

    def run(
        self, inputs: Sequence[torch.Tensor], weight: Weight, device: torch.device, at: Callable[[int], None]
    ) -> list[Any]:
        """Return the outputs on `device`. `weight` maps an index to a weight; `at` gets each operation's index."""


class ExportedNetwork:
    """The operations of `traced`, run one by one. ModelError for an inconsistent graph."""

    def __init__(self, exported_file: ExportedFile) -> None:
        graph, manifest = exported_file.graph, exported_file.manifest
        for what, wanted, there in (
            ("input", graph.inputs, manifest.inputs.keys()),
            ("weight", graph.weights, manifest.weights.keys()),
            ("constant", graph.constants, exported_file.constants.keys()),
        ):
            if absent := set(wanted) - there:
                raise ModelError(f"the exported denoiser uses an unknown {what}, {min(absent)}", name=min(absent))
        self._steps = steps_of(graph)
        self._outputs = ready(graph.outputs)
        self._constants = [exported_file.constants[name] for name in graph.constants]
        self._weights = range(len(graph.inputs), len(graph.inputs) + len(graph.weights))

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        weight: Weight,
        device: torch.device,
        at: Callable[[int], None] = lambda place: None,
    ) -> list[Any]:
        """Return the outputs on `device`. `weight` maps an index to a weight; `at` gets each operation's index."""
        weights = self._weights
        values: dict[int, Any] = {**dict(enumerate(inputs)), **dict(enumerate(self._constants, weights.stop))}

        def value(number: int) -> Any:
            return weight(number - weights.start) if number in weights else values[number]

        for place, step in enumerate(self._steps):
            at(place)
            values[weights.stop + len(self._constants) + place] = step.work(value, device)
            for number in step.over:
                values.pop(number, None)
        return list(filled(self._outputs, value, device))


def exported_forward(
    module: nn.Module, exported_file: ExportedFile, runs: ExportedCallable | None = None
) -> Callable[..., Any]:
    """Return a `forward(self, …)` for `module`'s class that runs `traced` with `module`'s own weights.

    ModelError if the two do not belong together. When it is called: RequestError, naming the input, for shapes, dtypes,
    devices and settings other than those exported; RunError for hooks that were set on modules inside since, because
    those modules are not called. Hooks that only watch a module (`module_hooks.watch`) are called when it would begin
    and when it would have ended.

    `runs` executes the graph (default: operation by operation).
    """
    check_plain(module)
    check_marks(module, exported_file.manifest)
    works = runs or ExportedNetwork(exported_file)
    tables = [_table(module, name) for name in exported_file.graph.weights]
    chains = _chains(module, [step.inside for step in exported_file.graph.operations])
    signature = inspect.signature(module.forward)

    def weight(place: int) -> torch.Tensor:
        table, name = tables[place]
        found: torch.Tensor = table[name]
        return found

    @functools.wraps(type(module).forward)  # pipelines inspect its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, device = check_call(exported_file.manifest, by_name(signature, args, kwargs))
        turns = _Turns(chains)
        try:
            outputs = works.run([tensors[name] for name in exported_file.graph.inputs], weight, device, turns.at)
        finally:
            turns.end()
        return outputs[0] if exported_file.manifest.returns == "tensor" else tuple(outputs)

    return forward


def _table(module: nn.Module, path: str) -> tuple[Any, str]:
    """The dict that holds the parameter or buffer at `path`, and its key there."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    return (part._parameters if name in part._parameters else part._buffers), name


def _chains(module: nn.Module, paths: Sequence[str]) -> list[Chain]:
    """Return, for each operation, the modules that contain it."""
    known: dict[str, Chain] = {}
    for path in dict.fromkeys(paths):
        ends = [end for end, sign in enumerate(path) if sign == "."] + ([len(path)] if path else [])
        try:
            known[path] = tuple(module.get_submodule(path[:end]) for end in ends)
        except AttributeError:
            raise ModelError(f"the exported denoiser works in an unknown module, {path:.80}", name=path) from None
    return [known[path] for path in paths]


class _Turns:
    """Tracks which modules would be running, and calls the hooks that watch them."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._now: Chain = ()
        self._ends: list[ExitStack] = []  # of the modules that would be running

    def at(self, place: int) -> None:
        self._turn_to(self._chains[place])

    def end(self) -> None:
        self._turn_to(())

    def _turn_to(self, chain: Chain) -> None:
        if chain is self._now:
            return
        common = sum(itertools.takewhile(bool, map(operator.is_, self._now, chain)))
        self._now = chain
        while len(self._ends) > common:
            self._ends.pop().close()
        for part in chain[common:]:
            end = ExitStack()
            self._ends.append(end)
            if part._forward_pre_hooks or part._forward_hooks:
                _check_hooks(part)
                end.enter_context(gates.at_work(part))


def _check_hooks(part: nn.Module) -> None:
    """Raise RunError for a hook that does more than watch."""
    for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
        if not gates.is_watch_hook(hook):
            kind = type(part).__name__
            raise RunError(f"a hook was set on a {kind} of an exported denoiser, which is never called", name=kind)
