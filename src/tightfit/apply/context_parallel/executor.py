"""A component's methods, each rank computing a share of the rows of every operation; the same numbers on every rank."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tightfit.apply.activations.exporting import NotExported, play
from tightfit.apply.activations.outputs import take_apart
from tightfit.apply.activations.strips.called_program import Rebuild, program_of, to_export
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph, capture_at
from tightfit.apply.activations.strips.graph_cache import kept_program, mark_of_call
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.program_inputs import LiveWeights, usual_generators
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.activations.strips.workarounds import work_around
from tightfit.apply.context_parallel.batch_halves import BatchHalves
from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs, rebuilt
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.rank_group import ExchangeRates, RankGroup
from tightfit.apply.context_parallel.rank_plan import RankPlan
from tightfit.apply.context_parallel.rank_runner import RankRunner
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.settings import NetworkSettings
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.apply.direct_calls import needs_gradients
from tightfit.apply.latest_used import LatestUsed
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.files import code_mark
from tightfit.measure.modules import find_role
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import ContextAttention, Plan
from tightfit.simulator.card import SimulatedCard
from tightfit.units import format_bytes

__all__ = ["ContextParallel", "ParallelMethod", "check_ranks", "parallel_forward", "parallel_methods"]


@dataclass(frozen=True)
class ContextParallel:
    """The ranks among which rows are shared, the share of each, and which inputs grow with the height, by component."""

    group: RankGroup
    shares: RowShares
    attention: ContextAttention
    doubled: Mapping[str, DoubledInputs | str]  # of denoisers; or why one runs whole on every rank
    exchange_rates: ExchangeRates | None = None  # None: not measured
    guidance: GuidanceRanks | None = None  # None: all ranks are one group

    @property
    def rows(self) -> RankGroup:
        """The ranks that share the rows of denoisers."""
        return self.group if self.guidance is None else self.guidance.rows

    @property
    def choices(self) -> dict[str, Any]:
        """Its fields of a Plan."""
        groups = self.group.size // self.rows.size
        return {"context": self.rows.size, "context_attention": self.attention, "cfg_groups": groups}

    def of_method(self, method: str) -> tuple[RankGroup, RowShares]:
        """Return the ranks that share the rows of a component's `method`, and the share of each.

        An autoencoder has no guidance: all ranks share its rows.
        """
        if self.guidance is None or method == "forward":
            return self.rows, self.shares
        return self.group, RowShares.equal(self.group.size)

    @property
    def mark(self) -> str:
        """What a call's measurement on this rank depends on, as text."""
        inputs, per_node = sorted(self.doubled.items()), getattr(self.group, "per_node", self.group.size)
        group = "" if self.guidance is None else f"guidance group {self.guidance.number}, "
        place = f"{group}rank {self.rows.rank} of {self.shares}, {per_node} a computer"
        return f"{place}, attention {self.attention}, inputs {inputs}"

    def following(self, plan: Plan) -> ContextParallel:
        """Return the same with the kind of attention that `plan` chose."""
        return replace(self, attention=plan.context_attention)

    def simulated(self, card: SimulatedCard) -> ContextParallel:
        """Return the same for this rank alone, on a simulated card."""
        group = SimulatedRankGroup.like(self.group, card)
        return replace(self, group=group, guidance=self.guidance and self.guidance.simulated(card))

    @contextlib.contextmanager
    def call(self, device: Device) -> Iterator[None]:
        """A pipeline's call, in which torch's generators on the CPU and on `device` begin as they do on rank 0."""
        with self.group.call():
            for generator in usual_generators(device) or ():
                state = generator.get_state()
                self.group.copy_from_first(state)
                generator.set_state(state)
            yield

    def noting(self, call: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
        """Return `call`, after which `note` is told how many bytes were sent."""

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            before = self._bytes_sent
            found = call(*args, **kwargs)
            sent = format_bytes(self._bytes_sent - before)
            note(f"rank {self.group.rank} of {self.group.size}: {sent} were sent to other ranks")
            return found

        return noted

    @property
    def _bytes_sent(self) -> int:
        return self.group.bytes_sent + (self.guidance.bytes_sent if self.guidance else 0)


@dataclass
class _PreparedCall:
    plan: RankPlan
    weights: LiveWeights
    rebuild: Rebuild


class ParallelMethod:
    """Runs `method` of the component `name`, of the class `kind`, on all ranks together.

    Calls with gradients, under autocast, or that are not supported run whole on every rank, and the recorder notes why.
    """

    def __init__(
        self, kind: type[nn.Module], name: str, method: str, parallel: ContextParallel, recorder: Recorder
    ) -> None:
        self._kind, self._name, self._method = kind, name, method
        self._parallel, self._recorder = parallel, recorder
        self._group, self._shares = parallel.of_method(method)
        self._known = LatestUsed[Any, _PreparedCall | str]()  # or the reason why not, by arguments
        self._settings: NetworkSettings | None = None  # with which these were prepared

    def wrapped(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that runs in place of `plain`, a function of the class."""

        @functools.wraps(plain)
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = ComponentArguments(args, kwargs)
            leaves, _ = call.flat()
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            prepared = self._prepare(module, call, leaves) if tensors else "it takes no tensor"
            if isinstance(prepared, str):
                self._recorder.note(f"{self._name}.{self._method} runs whole on every rank: {prepared}")
                return plain(module, *args, **kwargs)
            group = self._group
            with group.call():
                group.check_same(self._name, tensors)
                runner = RankRunner(prepared.plan, group, prepared.weights, self._recorder)
                return prepared.rebuild(runner.run_share(tensors))

        return run

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
                    _check_rows(program, self._group.size)
                    plan = RankPlan(StageGraph(program), self._shares, self._parallel.attention)
                    found = _PreparedCall(plan, LiveWeights(module, program), rebuild)
            except UnsupportedGraph as reason:
                found = str(reason)
            self._known[shapes] = found
        return found

    def _take_apart(self, module: nn.Module, call: ComponentArguments) -> tuple[Program, Rebuild]:
        if self._method == "forward":
            doubled = self._parallel.doubled.get(self._name, "it was not called when the pipeline was measured")
            if isinstance(doubled, str):
                raise UnsupportedGraph(doubled)
            return _program_of(module, self._kind, self._method, call, doubled)
        (first, *others), kwargs = call.args, dict(call.kwargs)  # an autoencoder's first argument alone has rows
        program, _, rebuild = program_of(
            module, self._kind, self._method, first, *tree_flatten((tuple(others), kwargs))
        )
        return program, rebuild


def check_ranks(plan: Plan, parallel: ContextParallel | None) -> None:
    """Raise PlanError if `plan` is for another number of ranks than run it."""
    rows, groups = (1, 1) if parallel is None else (parallel.rows.size, parallel.group.size // parallel.rows.size)
    if (plan.context, plan.cfg_groups) != (rows, groups):
        kinds, fields = {"context": plan.context}, "context"
        if plan.cfg_groups > 1:
            kinds["cfg"], fields = plan.cfg_groups, "context and cfg_groups"
        raise PlanError(
            f"the plan is for {_counted(plan.context, plan.cfg_groups)}, and {_counted(rows, groups)} would run it: "
            f"give fit parallel={json.dumps(kinds)} on that many ranks, or leave {fields} out of the plan",
            context=plan.context, ranks=rows * groups,
        )  # fmt: skip


def _counted(ranks: int, groups: int) -> str:
    return f"{ranks} ranks" if groups == 1 else f"{groups} groups of {ranks} ranks"


def parallel_forward(
    name: str, module: nn.Module, parallel: ContextParallel | None, recorder: Recorder
) -> dict[str, Any]:
    """Return the `forward` that runs in place of that of the denoiser `module`, by name; nothing for other modules."""
    if parallel is None or find_role(name, module) != "denoiser":
        return {}
    kind = type(module)
    forward: Callable[..., Any] = kind.forward
    if parallel.rows.size > 1:
        forward = ParallelMethod(kind, name, "forward", parallel, recorder).wrapped(forward)
    if parallel.guidance is not None:
        forward = BatchHalves(name, parallel.guidance, recorder).wrapped(forward)
    return {"forward": forward}


def parallel_methods(
    name: str, kind: type[nn.Module], otherwise: Mapping[str, Callable[..., Any]], parallel: ContextParallel,
    recorder: Recorder,
) -> dict[str, Callable[..., Any]]:  # fmt: skip
    """Return an autoencoder's methods, each on all ranks together; calls that cannot be go to `otherwise`."""
    return {
        method: ParallelMethod(kind, name, method, parallel, recorder).wrapped(plain)
        for method, plain in otherwise.items()
    }


def _program_of(
    module: nn.Module, kind: type[nn.Module], method: str, call: ComponentArguments, doubled: DoubledInputs
) -> tuple[Program, Rebuild]:
    """Return the program of a call, and a function that rebuilds its output from tensors. Raises UnsupportedGraph.

    Programs are cached on disk.
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


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
