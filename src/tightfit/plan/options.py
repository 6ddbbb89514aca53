"""All options for one component's weights, each with its bytes and its seconds.

Which options there are does not depend on a budget.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from tightfit.plan.candidates import Candidate, candidates
from tightfit.plan.component_cost import ComponentCost, always, round_up
from tightfit.plan.component_order import visits
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import WeightGroupSizes, small_tensor_bytes, weight_group_sizes
from tightfit.plan.lower_bounds import LowerBounds, Runs
from tightfit.plan.option_search import LazyOption, Option, OptionSet
from tightfit.schema.footprint import Component, ComponentCall, Footprint, Variant
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Granularity, Plan, Reason, Storage, VaePlan
from tightfit.schema.stores import NO_RATES, StoreRates
from tightfit.units import format_bytes, format_seconds

__all__ = [
    "RESIDENT",
    "ComponentWorkload",
    "SearchCache",
    "SearchCaches",
    "Visitor",
    "WeightLocation",
    "variant_of",
    "why_there",
]


RESIDENT = "resident"
WeightLocation = str  # RESIDENT, or the store to which weights are offloaded

ENOUGH = 0.9  # fraction of the bytes left: an option that loads less would gain nothing from more
SIZES = 24  # sizes tried from the least that a component can stream with to all of it, by equal factors, …
FEWER = 12  # … and for variants of denoisers
GRANULARITIES: tuple[Granularity, ...] = ("layer", "block")
WHOLE = VaePlan()  # autoencoders run on whole images


class ComponentWorkload:
    """Work of `component` on `device` in the call that `footprint` describes, and the options for its weights."""

    def __init__(
        self, component: Component, footprint: Footprint, device: Accelerator, usual: ComponentWorkload | None = None
    ) -> None:
        """`usual` is its workload in the usual variant, whose weight group sizes it shares."""
        self.component, self.device, self._footprint = component, device, footprint
        self._known: dict[tuple[str, Storage], dict[Granularity, WeightGroupSizes]] = usual._known if usual else {}
        self._works: dict[VaePlan, list[Runs]] = {}

    def seconds(self, vae: VaePlan = WHOLE) -> float:
        """Return the seconds that it runs if all weights are on the device."""
        return sum(
            count * self._cost_model.seconds_without_weights(done, way)
            for runs in self._work(vae)
            for done, count, way in runs
        )

    def always(self, *, remains: bool) -> int:
        """Return its bytes on the device during the whole call: of all weights if it `remains` there."""
        return always(self.component, self.device, remains=remains)

    def least(
        self, where: WeightLocation, storage: Storage = "as-loaded", variant: Variant | None = None
    ) -> int | None:
        """Return the fewest bytes that any of its options loads; None if it has no option."""
        least: int | None = None
        for sketch in sorted(self._sketches(where, storage, variant), key=lambda sketch: sketch.comes):
            if least is not None and sketch.comes >= least:
                break
            if _goes_with(variant, sketch.draft):
                comes = sketch.comes if sketch.exact else self._part(sketch.plan(self._by_leaf)).streamed_bytes
                least = comes if least is None else min(least, comes)
        return least

    def menu(
        self,
        where: WeightLocation,
        store_rates: StoreRates = NO_RATES,
        storage: Storage = "as-loaded",
        variant: Variant | None = None,
        vae: VaePlan = WHOLE,
    ) -> OptionSet:
        """Return its options with weights at `where`, if it runs as `variant` (None: as usual) and `vae` say.

        `store_rates`: see `StoreRates`.
        """
        work = self._work(vae)
        every, changes = self._sketches(where, storage, variant), variant.fields if variant else {}
        asked = [sketch.plan(self._by_leaf) for sketch in every if _goes_with(variant, sketch.draft)]
        part = self._part(every[0].draft, store_rates)
        least = None if part.is_resident else LowerBounds(part, self._groups(part.plan), work, self._cost_model)

        def offer(plan: ComponentPlan) -> LazyOption:
            seconds, comes = least.of(plan) if least else (self.seconds(vae), 0)
            settle = lambda: self._part(plan.model_copy(update=changes), store_rates)  # noqa: E731
            return LazyOption(
                seconds, comes, settle, least.of_part if least else lambda _: 0.0, lambda part: _time(part, work)
            )

        return OptionSet(map(offer, asked))

    def _sketches(self, where: WeightLocation, storage: Storage, variant: Variant | None) -> list[Candidate]:
        """Return all candidates; the first has all weights on the device."""
        if where == RESIDENT:
            return [Candidate(ComponentPlan(placement="resident", storage=storage), 0)]
        whole = ComponentPlan(placement="offload", offload_to=where, storage=storage)
        small = 0 if self.device.is_cpu else round_up(small_tensor_bytes(self.component))
        count = SIZES if variant is None else FEWER
        by_blocks = variant is not None and variant.splits_batch and variant.by_blocks
        found = candidates(self.component, whole, self._groups(whole), count, by_blocks=by_blocks)
        return [sketch._replace(comes=sketch.comes + small) for sketch in found]

    def _groups(self, plan: ComponentPlan) -> Mapping[Granularity, WeightGroupSizes]:
        key = plan.offload_to, plan.storage
        if key not in self._known:
            self._known[key] = {
                granularity: WeightGroupSizes(weight_group_sizes(self.component, granularity, plan))
                for granularity in GRANULARITIES
            }
        return self._known[key]

    def _part(self, plan: ComponentPlan, store_rates: StoreRates = NO_RATES) -> ComponentCost:
        return ComponentCost(self.component, plan, self.device, self._cost_model, store_rates, self._by_leaf)

    def _work(self, vae: VaePlan) -> list[Runs]:
        if vae not in self._works:
            self._works[vae] = _work_of(self.component, self._footprint, vae)
        return self._works[vae]

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel(self.component, self.device)

    @cached_property
    def _by_leaf(self) -> dict[str, float] | None:
        return self._cost_model.leaf_seconds(self._footprint, self.component)


def variant_of(footprint: Footprint, plan: Plan) -> Variant | None:
    """Return the variant of `footprint` as which denoisers run under `plan`; None: as usual."""
    parts = [plan.components[name] for name in footprint.denoisers if name in plan.components]
    return next((variant for variant in footprint.variants if all(_suits(variant, part) for part in parts)), None)


def _suits(variant: Variant, part: ComponentPlan) -> bool:
    """Whether a denoiser under its plan `part` runs as `variant` says.

    A streamed denoiser runs on parts of a batch block by block, others as a whole.
    """
    return _goes_with(variant, part) and all(getattr(part, name) == value for name, value in variant.fields.items())


def _goes_with(variant: Variant | None, part: ComponentPlan) -> bool:
    """Whether a denoiser with the placement of `part` can run as `variant` says."""
    return variant is None or not variant.splits_batch or variant.by_blocks == (part.placement == "stream")


def why_there(task: ComponentWorkload, option: Option, left: int, phase: str, vae: VaePlan) -> Reason:
    """Return why `option` of a task's component was chosen: in `phase`, `left` bytes remain for weights to load."""
    name, plan, whole = task.component.name, option.plan, format_bytes(task.component.bytes)
    if plan.placement == "resident":
        return Reason(decision=f"{name} is resident", because=f"its {whole} fit in every phase")
    free = f"{format_bytes(max(left, 0))} free in {phase}"
    whence = "" if plan.store.in_ram else f" from the {plan.store.title}"
    if plan.placement == "offload":
        return Reason(decision=f"{name} is loaded{whence} for its phase", because=f"its {whole} fit into the {free}")
    late = option.seconds - task.seconds(vae)
    cost = f"adds {format_seconds(late)} to the call" if late > 0 else "adds no time"
    resident, kind = len(plan.resident_layers or ()), "block" if plan.granularity == "block" else "layer"
    ahead = format_bytes(plan.ring_buffer or 0)
    kept = f"{resident or 'no'} resident {kind}{'s' * (resident != 1)}, others loaded up to {ahead} ahead"
    enough = ", which would not make it faster" if option.streamed_bytes < ENOUGH * left else ""
    return Reason(
        decision=f"{name} is streamed{whence}, {format_bytes(option.device_bytes)} of {whole} on the device",
        because=f"{kept}; {cost}, with {free}{enough}",
    )


def _time(part: ComponentCost, work: Sequence[Runs]) -> float:
    """Return the simulated seconds of `work` under the plan of `part`."""
    spent = 0.0
    for runs in work:
        spent = spent if part.is_resident else part.begin_load(spent)
        for done, count, way in runs:
            spent = part.work(done, count, spent, way)
    return spent


def _work_of(component: Component, footprint: Footprint, vae: VaePlan) -> list[Runs]:
    """Return its calls each time that it is loaded, with the number of consecutive ones and their strip option."""
    ways = {id(done): vae.strip_profile(phase) for phase in footprint.phases for done in phase.calls}
    passes = (phase.calls[index] for phase in footprint.phases for index in phase.call_order)
    own = (done for done in passes if done.component == component.name)
    work = (list(itertools.islice(own, count)) for count in visits(footprint).get(component.name, ()))
    return [[(done[0], len(done), ways[id(done[0])]) for done in map(list, _alike(some))] for some in work]


def _alike(passes: Sequence[ComponentCall]) -> Iterator[Iterator[ComponentCall]]:
    """Group consecutive identical calls."""
    return (group for _, group in itertools.groupby(passes, key=id))


Visitor = tuple[str, tuple[int, ...]]  # a component's name, and its number of calls each time that it is loaded


class SearchCache:
    """Workloads, options and least bytes of components in one variant, by their names and visits to the device."""

    def __init__(self) -> None:
        self.tasks: dict[Visitor, ComponentWorkload] = {}
        self.menus: dict[tuple[Visitor, WeightLocation, VaePlan], OptionSet] = {}
        self.leasts: dict[tuple[Visitor, WeightLocation], int | None] = {}

    def without(self, names: Collection[str]) -> SearchCache:
        """Return a copy without the results of the components `names`."""
        other = SearchCache()
        other.tasks = {visitor: task for visitor, task in self.tasks.items() if visitor[0] not in names}
        other.menus = {key: menu for key, menu in self.menus.items() if key[0][0] not in names}
        other.leasts = {key: least for key, least in self.leasts.items() if key[0][0] not in names}
        return other


class SearchCaches:
    """Caches of one pipeline call on one device, for all searches over it with any memory limits.

    These may differ in the bytes that phases need, in the strip options of autoencoders and in denoiser variants.
    """

    def __init__(self) -> None:
        self._known: dict[int, SearchCache] = {}
        self._passes: list[object] = []
        self._ways: list[object] = []

    def known(self, footprint: Footprint) -> dict[int, SearchCache]:
        """Return the caches for a search over `footprint`, by variant number; empty if it is of another call."""
        passes: list[object] = [phase.calls for phase in footprint.phases]
        ways: list[object] = [
            [(way.strip_bytes, way.feature_maps) for way in phase.strip_options] for phase in footprint.phases
        ]
        if len(passes) != len(self._passes) or any(map(operator.is_not, passes, self._passes)):
            self._known = {}
        elif ways != self._ways:
            names = {component.name for component in footprint.components if component.role == "autoencoder"}
            self._known = {number: known.without(names) for number, known in self._known.items()}
        self._passes, self._ways = passes, ways
        return self._known
