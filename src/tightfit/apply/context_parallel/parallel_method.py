"""A component's method, each rank computing a share of the rows of every operation; the same numbers on every rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tightfit.apply.activations.exporting import NotExported, play
from tightfit.apply.activations.outputs import take_apart
from tightfit.apply.activations.strips.called_program import Rebuild, program_of, to_export
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph, capture_at
from tightfit.apply.activations.strips.graph_cache import kept_program, mark_of_call
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.program_inputs import LiveWeights
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.activations.strips.workarounds import work_around
from tightfit.apply.activations.vae_tiling import sliced
from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs, rebuilt
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.rank_plan import RankPlan
from tightfit.apply.context_parallel.rank_runner import RankRunner
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.settings import NetworkSettings
from tightfit.apply.direct_calls import needs_gradients
from tightfit.apply.latest_used import LatestUsed
from tightfit.files import code_mark
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import ContextAttention

__all__ = ["ParallelMethod", "RowSharing"]


class RowSharing(NamedTuple):
    """The ranks that share the rows of a network, the share of each, and how attention reaches the keys of others.

    Each computes its share in strips within `strip_bytes`, besides feature maps that are kept; None: at once.
    """

    group: RankGroup
    shares: RowShares
    attention: ContextAttention
    strip_bytes: int | None = None


@dataclass
class _PreparedCall:
    plan: RankPlan
    weights: LiveWeights
    rebuild: Rebuild
    digest: torch.Tensor  # one number of the program, which is the same on every rank


class ParallelMethod:
    """Runs `method` of the component `name`, of the class `kind`, on all ranks together.

    Calls with gradients, under autocast, or that are not supported run whole on every rank, and the recorder notes why.
    """

    def __init__(
        self, kind: type[nn.Module], name: str, method: str, sharing: RowSharing, recorder: Recorder,
        doubled: DoubledInputs | str = "", *, by_item: bool = False,
    ) -> None:  # fmt: skip
        """`doubled`: which inputs of a denoiser's `forward` grow with the height; else why that is not known.

        `by_item`: an autoencoder's items of a batch run one at a time, unless it draws noise for all of them.
        """
        self._kind, self._name, self._method = kind, name, method
        self._sharing, self._recorder, self._doubled, self._by_item = sharing, recorder, doubled, by_item
        self._known = LatestUsed[Any, _PreparedCall | str]()  # or the reason why not, by arguments
        self._settings: NetworkSettings | None = None  # with which these were prepared

    def wrapped(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that runs in place of `plain`, a function of the class."""

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = ComponentArguments(args, kwargs)
            leaves, _ = call.flat()
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            prepared = self._prepare(module, call, leaves) if tensors else "it takes no tensor"
            if isinstance(prepared, str):
                self._recorder.note(f"{self._name}.{self._method} runs whole on every rank: {prepared}")
                return plain(module, *args, **kwargs)
            if prepared.plan.gathered_note:
                self._recorder.note(f"{self._name}.{self._method}: {prepared.plan.gathered_note}")
            group = self._sharing.group
            with group.call():
                group.check_same(self._name, [*tensors, prepared.digest], "has other arguments, or another network,")
                runner = RankRunner(prepared.plan, group, prepared.weights, self._recorder)
                return prepared.rebuild(runner.run_share(tensors))

        if self._method == "forward":
            return functools.wraps(plain)(run)
        first = list(inspect.signature(plain).parameters)[1]

        @functools.wraps(plain)
        def run_method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not args and first in kwargs:
                args = (kwargs.pop(first),)
            way = functools.partial(run, module)
            by_item = self._by_item and not self._draws_noise(module, ComponentArguments(args, kwargs))
            return (sliced(way) if by_item else way)(*args, **kwargs)

        return run_method

    def _draws_noise(self, module: nn.Module, call: ComponentArguments) -> bool:
        """Whether a call with a batch draws noise for all its items at once."""
        if not call.args or len(call.args[0]) == 1:
            return False
        prepared = self._prepare(module, call, call.flat()[0])
        return not isinstance(prepared, str) and prepared.plan.graph.program.draws_noise

    def _prepare(self, module: nn.Module, call: ComponentArguments, leaves: Sequence[Any]) -> _PreparedCall | str:
        if needs_gradients(module, call.args, call.kwargs):
            return "gradients were asked for"
        if torch.is_autocast_enabled(_tensors(leaves)[0].device.type):
            return "it is called under autocast"
        if self._method == "forward" and (self._settings is None or not self._settings.unchanged):
            self._known.clear()
            self._settings = NetworkSettings(module)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
        found = self._known.get(shapes)
        if found is None:
            try:
                with self._recorder.uncounted():
                    program, rebuild = self._take_apart(_without_wrappers(module), call)
                    _check_rows(program, self._sharing.group.size)
                    sharing, graph = self._sharing, StageGraph(program)
                    plan = RankPlan(graph, sharing.shares, sharing.attention, sharing.strip_bytes)
                    found = _PreparedCall(plan, LiveWeights(module, program), rebuild, _digest(program))
            except UnsupportedGraph as reason:
                found = str(reason)
            self._known[shapes] = found
        return found

    def _take_apart(self, module: nn.Module, call: ComponentArguments) -> tuple[Program, Rebuild]:
        if self._method == "forward":
            known, because = ([], [self._doubled]) if isinstance(self._doubled, str) else ([self._doubled], [])
            for each in dict.fromkeys((*known, *DoubledInputs.guesses(call))):
                try:
                    return _program_of(module, self._kind, self._method, call, each, guessed=each not in known)
                except UnsupportedGraph as reason:
                    because.append(str(reason))
            raise UnsupportedGraph(because[0])
        (first, *others), kwargs = call.args, dict(call.kwargs)  # an autoencoder's first argument alone has rows
        program, _, rebuild = program_of(
            module, self._kind, self._method, first, *tree_flatten((tuple(others), kwargs))
        )
        return program, rebuild


def _program_of(
    module: nn.Module, kind: type[nn.Module], method: str, call: ComponentArguments, doubled: DoubledInputs,
    *, guessed: bool = False,
) -> tuple[Program, Rebuild]:  # fmt: skip
    """Return the program of a call, and a function that rebuilds its output from tensors. Raises UnsupportedGraph.

    Programs are cached on disk. What is only `guessed` to be doubled is first tried by shapes, which takes less time.
    """
    leaves, form = call.flat()
    others, _ = doubled.double(call)
    rebuild: list[Rebuild] = []
    sizes = [tuple(each.shape) for each in _tensors(leaves)]

    def run(double: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
        own = [tuple(each.shape) for each in tensors] == sizes
        left = iter(tensors)
        filled = [next(left) if isinstance(x, torch.Tensor) else x for x in (leaves if own else others)]
        again = rebuilt(filled, form)
        parts, together = take_apart(getattr(double, method)(*again.args, **again.kwargs))
        if own:
            rebuild[:] = [together]
        return parts

    double, given = to_export(module, kind, leaves)
    mark = mark_of_call(double, method, (form, doubled.leaves), leaves)
    work_around(double)
    if guessed:
        try:
            play(lambda: run(double, *_tensors(others)))
        except NotExported as reason:
            raise UnsupportedGraph(str(reason)) from reason
    make = functools.partial(capture_at, double, run, given, _tensors(others))
    program = kept_program(mark and f"{mark}-{code_mark():.16}", double, given, make)
    if not rebuild:  # the program was cached, so the type of the output is not known yet
        with contextlib.suppress(NotExported):
            play(lambda: run(double, *given))
    return (program if rebuild else make()), rebuild[0]


WRAPPED = ("forward", "encode", "decode")


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Return `module` without what others put around its methods, which runs already: a profiler, a library's hook."""
    bare = object.__new__(type(module))
    vars(bare).update({name: value for name, value in vars(module).items() if name not in WRAPPED})
    return bare


def _check_rows(program: Program, ranks: int) -> None:
    """Raise UnsupportedGraph where an operation has fewer rows than there are ranks."""
    fewest = min((node.rows for node in program.nodes if node.axis is not None), default=0)
    if fewest < ranks:
        raise UnsupportedGraph(f"one of its operations has {fewest} rows, for {ranks} ranks")


def _digest(program: Program) -> torch.Tensor:
    """Return a number that differs where operations do: of an adapter or a setting that only one rank has.

    Each rank has another device, and objects at other addresses: both are left out.
    """
    operations = "\n".join(f"{node.op} {node.args} {node.kwargs} {node.shape} {node.name}" for node in program.nodes)
    text = re.sub(r" at 0x[0-9a-f]+|cuda:\d+|, index=\d+", "", operations)
    return torch.tensor(float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)), dtype=torch.float64)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
