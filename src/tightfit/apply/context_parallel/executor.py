"""The ranks on which a pipeline's networks run together, and what runs there in place of components' methods."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from tightfit.apply.activations.strips.program_inputs import usual_generators
from tightfit.apply.context_parallel.batch_halves import BatchHalves
from tightfit.apply.context_parallel.call_pairs import CallPairs
from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.paired_denoiser import PairedDenoiser
from tightfit.apply.context_parallel.parallel_method import ParallelMethod, RowSharing
from tightfit.apply.context_parallel.rank_group import ExchangeRates, RankGroup
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.apply.context_parallel.weight_sharing import WeightSharing
from tightfit.apply.session import Session
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.modules import find_role
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import ComponentPlan, ContextAttention, Plan
from tightfit.schema.rank_option import AUTOENCODERS_AT_ONCE, AutoencoderSharing, RankOption
from tightfit.schema.vae_plan import VaePlan
from tightfit.simulator.card import SimulatedCard
from tightfit.units import format_bytes

__all__ = ["ContextParallel", "check_ranks", "parallel_call", "parallel_forward", "parallel_methods", "shares_weights"]


@dataclass(frozen=True)
class ContextParallel:
    """The ranks of a call, the share of rows of each, and which inputs grow with the height, by component."""

    group: RankGroup
    shares: RowShares  # of all ranks; in each of two groups, in the same proportions
    attention: ContextAttention
    doubled: Mapping[str, DoubledInputs | str]  # of denoisers; or why that is not known before their first call
    exchange_rates: ExchangeRates | None = None  # None: not measured
    guidance: GuidanceRanks | None = None  # None: all ranks are one group
    two_groups: GuidanceRanks | None = None  # `guidance` under a plan for two groups; None: there is no choice
    options: tuple[RankOption, ...] = ()  # among which a plan chooses
    weights: WeightSharing | None = None  # None: each rank has its own copy of weights in host memory
    autoencoders: AutoencoderSharing = AUTOENCODERS_AT_ONCE  # with which a call is measured

    @cached_property
    def pairs(self) -> CallPairs | None:
        """The calls that guidance groups compute in turns, of pipelines that follow one plan."""
        return None if self.guidance is None else CallPairs(self.guidance)

    @property
    def rows(self) -> RankGroup:
        """The ranks that share the rows of denoisers."""
        return self.group if self.guidance is None else self.guidance.rows

    @property
    def choices(self) -> dict[str, Any]:
        """Its fields of a Plan."""
        shares = () if self.shares == RowShares.equal(self.group.size) else self.shares.speeds
        fields = {"context": self.rows.size, "cfg_groups": self.groups, "rank_shares": shares}
        return fields | {"context_attention": self.attention}

    @property
    def sharing(self) -> RowSharing:
        """How the rows of denoisers are shared."""
        first = self.rows.size * self.guidance.number if self.guidance is not None else 0
        own = RowShares(self.shares.speeds[first : first + self.rows.size])
        return RowSharing(self.rows, own, self.attention)

    @property
    def sharing_by_all(self) -> RowSharing:
        """How the rows of autoencoders are shared: they have no guidance, so all ranks share them."""
        return RowSharing(self.group, self.shares, self.attention)

    @property
    def mark(self) -> str:
        """What a call's measurement on this rank depends on, as text."""
        inputs, per_node = sorted(self.doubled.items()), self.group.per_node
        group = "" if self.guidance is None else f"guidance group {self.guidance.number}, "
        place = f"{group}rank {self.rows.rank} of {self.shares}, {per_node} a computer"
        autoencoders = ", ".join(f"{name}={value}" for name, value in self.autoencoders.fields.items())
        return f"{place}, autoencoders {autoencoders}, attention {self.attention}, inputs {inputs}"

    @property
    def groups(self) -> int:
        """How many groups of `rows` there are."""
        return self.group.size // self.rows.size

    def with_option(self, option: RankOption) -> ContextParallel:
        """Return the same with that kind of attention, and in so many groups unless their number is fixed."""
        found = replace(self, attention=option.context_attention)
        if option.cfg_groups == self.groups or self.two_groups is None:
            return found
        return replace(found, guidance=self.two_groups if option.cfg_groups > 1 else None)

    def with_shares(self, shares: Sequence[float]) -> ContextParallel:
        """Return the same, whose ranks have `shares` of the rows, in proportion; (): equal ones. Raises PlanError."""
        if shares and len(shares) != self.group.size:
            raise PlanError(
                f"rank_shares={list(shares)} has {len(shares)} shares, and there are {self.group.size} ranks"
            )
        return replace(self, shares=RowShares(tuple(shares)) if shares else RowShares.equal(self.group.size))

    def as_asked(self, choices: Mapping[str, Any]) -> ContextParallel:
        """Return the same as a user's `choices` of Plan fields want it, as far as it may be; defaults want nothing."""
        found = self.with_shares(choices["rank_shares"]) if choices.get("rank_shares") else self
        said = {name: choices[name] for name in RankOption._fields if name in choices}
        wanted = {name: value for name, value in said.items() if value != Plan.model_fields[name].default}
        option = next((each for each in self.options if wanted.items() <= each._asdict().items()), None)
        return found if option is None else found.with_option(option)

    def following(self, plan: Plan) -> ContextParallel:
        """Return the same with the groups, shares and kind of attention that `plan` chose."""
        return self.with_option(RankOption(plan.cfg_groups, plan.context_attention)).with_shares(plan.rank_shares)

    def simulated(self, card: SimulatedCard) -> ContextParallel:
        """Return the same for this rank alone, on a simulated card."""
        group = SimulatedRankGroup.like(self.group, card)
        guidance = self.guidance and self.guidance.simulated(card)
        return replace(self, group=group, weights=None, guidance=guidance, two_groups=None)

    @contextlib.contextmanager
    def call(self, device: Device) -> Iterator[None]:
        """A pipeline's call, in which torch's generators on the CPU and on `device` begin as they do on rank 0."""
        with self.group.call():
            for generator in usual_generators(device) or ():
                state = generator.get_state()
                self.group.copy_from_first(state)
                generator.set_state(state)
            yield

    def noted(self, call: Callable[[], Any], note: Callable[[str], None], session: Session) -> Any:
        """Return `call()`, before which weights are shared; `note` is told of it, and how many bytes were sent."""
        for said in self.share_weights(session):
            note(said)
        before = self._bytes_sent
        with contextlib.nullcontext() if self.pairs is None else self.pairs.call():
            found = call()
        sent = format_bytes(self._bytes_sent - before)
        note(f"rank {self.group.rank} of {self.group.size}: {sent} were sent to other ranks")
        return found

    def compare_weights(self, components: Mapping[str, nn.Module]) -> None:
        """Say in the log and in reports which `components`, by name, have other weights on other ranks. Collective."""
        if self.weights is not None:
            self.weights.compare(components)

    def share_weights(self, session: Session) -> list[str]:
        """Share weights of the plan of `session` among the ranks of a computer; return sentences on it. Collective."""
        if self.weights is None:
            return []
        return self.weights.described(*session.share(self.weights.share))

    @property
    def _bytes_sent(self) -> int:
        return self.group.bytes_sent + (self.guidance.bytes_sent if self.guidance else 0)


def shares_weights(parallel: ContextParallel | None) -> bool:
    """Whether weights in host memory may be shared with other ranks."""
    return parallel is not None and parallel.weights is not None


def check_ranks(plan: Plan, parallel: ContextParallel | None) -> None:
    """Raise PlanError if `plan` is for another number of ranks than run it."""
    followed = parallel and parallel.following(plan)
    rows, groups = (1, 1) if followed is None else (followed.rows.size, followed.groups)
    if (plan.context, plan.cfg_groups) != (rows, groups):
        kinds, fields = {"context": plan.context}, "context"
        if plan.cfg_groups > 1:
            kinds["cfg"], fields = plan.cfg_groups, "context and cfg_groups"
        raise PlanError(
            f"the plan is for {_counted(plan.context, plan.cfg_groups, ' ranks')}, and {_counted(rows, groups)} would "
            f"run it: give fit parallel={json.dumps(kinds)} on that many ranks, or leave {fields} out of the plan",
            context=plan.context, ranks=rows * groups,
        )  # fmt: skip


def _counted(ranks: int, groups: int, unit: str = "") -> str:
    return f"{ranks * groups}{unit}" + f" in {groups} groups" * (groups > 1)


def parallel_forward(
    name: str, module: nn.Module, parallel: ContextParallel | None, recorder: Recorder
) -> dict[str, Any]:
    """Return the `forward` that runs in place of that of the denoiser `module`, by name; nothing for other modules."""
    if parallel is None or find_role(name, module) != "denoiser":
        return {}
    kind = type(module)
    forward: Callable[..., Any] = kind.forward
    if parallel.rows.size > 1:
        doubled = parallel.doubled.get(name, "it was not called when the pipeline was measured")
        forward = ParallelMethod(kind, name, "forward", parallel.sharing, recorder, doubled).wrapped(forward)
    if parallel.guidance is not None:
        forward = BatchHalves(name, parallel.guidance, recorder).wrapped(forward)
    return {"forward": forward}


def parallel_call(
    name: str, module: nn.Module, plan: ComponentPlan, parallel: ContextParallel | None, recorder: Recorder,
    call: Callable[..., Any], busy: Callable[[], bool],
) -> Callable[..., Any]:  # fmt: skip
    """Return the `__call__` that runs in place of `call`, that of `module`, some calls in one group of ranks only.

    `busy`: whether another component is running, a part of which this one is then.
    """
    pairs = None if parallel is None else parallel.pairs
    if pairs is None or find_role(name, module) != "denoiser" or plan.cfg == "batched":  # those are halved
        return call
    return PairedDenoiser(name, pairs, recorder, halves=plan.exported is None).wrapped(call, busy)


def parallel_methods(
    name: str, kind: type[nn.Module], otherwise: Mapping[str, Callable[..., Any]], parallel: ContextParallel,
    plan: VaePlan, recorder: Recorder,
) -> dict[str, Callable[..., Any]]:  # fmt: skip
    """Return an autoencoder's methods, each on all ranks together; calls that cannot be go to `otherwise`.

    Each rank computes its rows in strips, if these are in the `plan`, and keeps feature maps on its device.
    """
    sharing = parallel.sharing_by_all._replace(strip_bytes=plan.strips)
    by_item = plan.slicing or plan.strips is not None
    return {
        method: ParallelMethod(kind, name, method, sharing, recorder, by_item=by_item).wrapped(plain)
        for method, plain in otherwise.items()
    }
