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
from tightfit.plan.component_order import calls_per_load
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
    "WeightLocation",
    "WorkloadKey",
    "placement_reason",
    "variant_of",
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
        self, component: Component, footprint: Footprint, device: Accelerator, base: ComponentWorkload | None = None
    ) -> None:
        """`base` is its workload in the usual variant, whose weight group sizes it shares."""
        self.component, self.device, self._footprint = component, device, footprint
        self._group_sizes: dict[tuple[str, Storage], dict[Granularity, WeightGroupSizes]] = {}
        if base is not None:
            self._group_sizes = base._group_sizes
        self._work_by_vae: dict[VaePlan, list[Runs]] = {}

    def seconds(self, vae: VaePlan = WHOLE) -> float:
        """Return the seconds that it runs if all weights are on the device."""
        return sum(
            count * self._cost_model.seconds_without_weights(call, strip_profile)
            for runs in self._work(vae)
            for call, count, strip_profile in runs
        )

    def always(self, *, remains: bool) -> int:
        """Return its bytes on the device during the whole call: of all weights if it `remains` there."""
        return always(self.component, self.device, remains=remains)

    def min_bytes(
        self, location: WeightLocation, storage: Storage = "as-loaded", variant: Variant | None = None
    ) -> int | None:
        """Return the fewest bytes that any of its options loads; None if it has no option."""
        least: int | None = None
        found = self._candidates(location, storage, variant)
        for candidate in sorted(found, key=lambda candidate: candidate.streamed_bytes):
            if least is not None and candidate.streamed_bytes >= least:
                break
            if _is_compatible(variant, candidate.plan):
                size = candidate.streamed_bytes
                if not candidate.exact:
                    size = self._cost(candidate.plan_by_times(self._seconds_by_layer)).streamed_bytes
                least = size if least is None else min(least, size)
        return least

    def option_set(
        self,
        location: WeightLocation,
        store_rates: StoreRates = NO_RATES,
        storage: Storage = "as-loaded",
        variant: Variant | None = None,
        vae: VaePlan = WHOLE,
    ) -> OptionSet:
        """Return its options with weights at `location`, if it runs as `variant` (None: as usual) and `vae` say.

        `store_rates`: see `StoreRates`.
        """
        work = self._work(vae)
        found, changes = self._candidates(location, storage, variant), self._fields(variant)
        compatible = (candidate for candidate in found if _is_compatible(variant, candidate.plan))
        plans = [candidate.plan_by_times(self._seconds_by_layer) for candidate in compatible]
        cost = self._cost(found[0].plan, store_rates)
        bounds = None if cost.is_resident else LowerBounds(cost, self._groups(cost.plan), work, self._cost_model)

        def lazy_option(plan: ComponentPlan) -> LazyOption:
            seconds, streamed_bytes = bounds.for_plan(plan) if bounds else (self.seconds(vae), 0)
            resolve = lambda: self._cost(plan.model_copy(update=changes), store_rates)  # noqa: E731
            return LazyOption(
                seconds,
                streamed_bytes,
                resolve,
                lambda cost: _simulated_seconds(cost, work),
            )

        return OptionSet(map(lazy_option, plans))

    def _fields(self, variant: Variant | None) -> Mapping[str, object]:
        """Return plan fields that say how it runs."""
        if variant is not None:
            return variant.fields
        request, is_denoiser = self._footprint.request, self.component.role == "denoiser"
        differentiated = request is not None and request.backward is not None and is_denoiser
        return {"gradient_checkpointing": False} if differentiated else {}

    def _candidates(self, location: WeightLocation, storage: Storage, variant: Variant | None) -> list[Candidate]:
        """Return all candidates; the first has all weights on the device."""
        if location == RESIDENT:
            return [Candidate(ComponentPlan(placement="resident", storage=storage), 0)]
        whole = ComponentPlan(placement="offload", offload_to=location, storage=storage)
        small = 0 if self.device.is_cpu else round_up(small_tensor_bytes(self.component))
        count = SIZES if variant is None else FEWER
        by_blocks = variant is not None and variant.splits_batch and variant.by_blocks
        found = candidates(self.component, whole, self._groups(whole), count, by_blocks=by_blocks)
        found = itertools.islice(found, 1) if self._overlaps else found
        return [candidate._replace(streamed_bytes=candidate.streamed_bytes + small) for candidate in found]

    @property
    def _overlaps(self) -> bool:
        """Whether it runs chunks of a batch one after another, for each of which streamed weights would be loaded."""
        calls = (call for phase in self._footprint.phases for call in phase.calls)
        return any(call.overlaps for call in calls if call.component == self.component.name)

    def _groups(self, plan: ComponentPlan) -> Mapping[Granularity, WeightGroupSizes]:
        key = plan.offload_to, plan.storage
        if key not in self._group_sizes:
            self._group_sizes[key] = {
                granularity: WeightGroupSizes(weight_group_sizes(self.component, granularity, plan))
                for granularity in GRANULARITIES
            }
        return self._group_sizes[key]

    def _cost(self, plan: ComponentPlan, store_rates: StoreRates = NO_RATES) -> ComponentCost:
        return ComponentCost(self.component, plan, self.device, self._cost_model, store_rates, self._seconds_by_layer)

    def _work(self, vae: VaePlan) -> list[Runs]:
        if vae not in self._work_by_vae:
            self._work_by_vae[vae] = _work_of(self.component, self._footprint, vae)
        return self._work_by_vae[vae]

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel(self.component, self.device)

    @cached_property
    def _seconds_by_layer(self) -> dict[str, float] | None:
        return self._cost_model.layer_seconds(self._footprint, self.component)


def variant_of(footprint: Footprint, plan: Plan) -> Variant | None:
    """Return the variant of `footprint` as which denoisers run under `plan`; None: as usual."""
    parts = [plan.components[name] for name in footprint.denoisers if name in plan.components]
    return next((variant for variant in footprint.variants if all(_matches(variant, part) for part in parts)), None)


def _matches(variant: Variant, part: ComponentPlan) -> bool:
    """Whether a denoiser under its plan `part` runs as `variant` says.

    A streamed denoiser runs on parts of a batch block by block, others as a whole.
    """
    fields = dict(variant.fields)
    again = fields.pop("gradient_checkpointing", None)
    return (
        _is_compatible(variant, part)
        and again in (None, part.checkpoints_gradients)
        and all(getattr(part, name) == value for name, value in fields.items())
    )


def _is_compatible(variant: Variant | None, part: ComponentPlan) -> bool:
    """Whether a denoiser with the placement of `part` can run as `variant` says."""
    return variant is None or not variant.splits_batch or variant.by_blocks == (part.placement == "stream")


def placement_reason(workload: ComponentWorkload, option: Option, left: int, phase: str, vae: VaePlan) -> Reason:
    """Return why `option` of a workload's component was chosen: in `phase`, `left` bytes remain for weights to load."""
    name, plan, whole = workload.component.name, option.plan, format_bytes(workload.component.bytes)
    if plan.placement == "resident":
        return Reason(decision=f"{name} is resident", because=f"its {whole} fit in every phase")
    room = f"{phase} has room for {format_bytes(max(left, 0))} of weights"
    source = "" if plan.store.is_host_memory else f" from the {plan.store.title}"
    if plan.placement == "offload":
        return Reason(decision=f"{name} is loaded{source} for its phase", because=f"its {whole} fit: {room}")
    added_seconds = option.seconds - workload.seconds(vae)
    cost = f"adds {format_seconds(added_seconds)} to the call" if added_seconds > 0 else "adds no time"
    resident, kind = len(plan.resident_layers or ()), "block" if plan.granularity == "block" else "layer"
    ahead = format_bytes(plan.ring_buffer or 0)
    kept = f"{resident or 'no'} resident {kind}{'s' * (resident != 1)}, others loaded up to {ahead} ahead"
    enough = ", and using more of that would not make it faster" if option.streamed_bytes < ENOUGH * left else ""
    return Reason(
        decision=f"{name} is streamed{source}, {format_bytes(option.device_bytes)} of {whole} on the device",
        because=f"{kept}; loading {cost}; {room}{enough}",
    )


def _simulated_seconds(cost: ComponentCost, work: Sequence[Runs]) -> float:
    """Return the simulated seconds of `work` under the plan of `cost`."""
    spent = 0.0
    for runs in work:
        spent = spent if cost.is_resident else cost.begin_load(spent)
        for call, count, strip_profile in runs:
            spent = cost.work(call, count, spent, strip_profile)
    return spent


def _work_of(component: Component, footprint: Footprint, vae: VaePlan) -> list[Runs]:
    """Return its calls each time that it is loaded, with the number of consecutive ones and their strip option."""
    strip_profiles = {id(call): vae.strip_profile(phase) for phase in footprint.phases for call in phase.calls}
    calls = (phase.calls[index] for phase in footprint.phases for index in phase.call_order)
    own = (call for call in calls if call.component == component.name)
    work = (list(itertools.islice(own, count)) for count in calls_per_load(footprint).get(component.name, ()))
    return [
        [(run[0], len(run), strip_profiles[id(run[0])]) for run in map(list, _identical_runs(some))] for some in work
    ]


def _identical_runs(calls: Sequence[ComponentCall]) -> Iterator[Iterator[ComponentCall]]:
    """Group consecutive identical calls."""
    return (group for _, group in itertools.groupby(calls, key=id))


StripOption = tuple[int | None, str]  # bytes for strips, and where feature maps are kept
WorkloadKey = tuple[str, tuple[int, ...]]  # a component's name, and its number of calls each time that it is loaded


class SearchCache:
    """Workloads, options and least bytes of components in one variant, by their names and calls for each load."""

    def __init__(self) -> None:
        self.workloads: dict[WorkloadKey, ComponentWorkload] = {}
        self.option_sets: dict[tuple[WorkloadKey, WeightLocation, VaePlan], OptionSet] = {}
        self.min_bytes: dict[tuple[WorkloadKey, WeightLocation], int | None] = {}

    def without(self, names: Collection[str], strip_options: Collection[StripOption]) -> SearchCache:
        """Return a copy without what depends on these strip options of the components `names`."""
        other = SearchCache()
        other.workloads = {key: workload for key, workload in self.workloads.items() if key[0] not in names}
        other.option_sets = {
            (workload, location, vae): option_set
            for (workload, location, vae), option_set in self.option_sets.items()
            if workload[0] not in names or (vae.strips, vae.feature_maps) not in strip_options
        }
        other.min_bytes = self.min_bytes
        return other


class SearchCaches:
    """Caches of one pipeline call on one device, for all searches over it with any memory limits.

    These may differ in the bytes that phases need, in the strip options of autoencoders and in denoiser variants.
    """

    def __init__(self) -> None:
        self._caches: dict[int, SearchCache] = {}
        self._calls: list[object] = []
        self._strip_options: list[set[StripOption]] = []

    def caches_for(self, footprint: Footprint) -> dict[int, SearchCache]:
        """Return the caches for a search over `footprint`, by variant number; empty if it is of another call."""
        calls: list[object] = [phase.calls for phase in footprint.phases]
        strip_options: list[set[StripOption]] = [
            {(profile.strip_bytes, profile.feature_maps) for profile in phase.strip_options}
            for phase in footprint.phases
        ]
        if len(calls) != len(self._calls) or any(map(operator.is_not, calls, self._calls)):
            self._caches = {}
        elif strip_options != self._strip_options:
            names = {component.name for component in footprint.components if component.role == "autoencoder"}
            pairs = zip(strip_options, self._strip_options, strict=True)
            changed = set[StripOption]().union(*(now ^ before for now, before in pairs))
            self._caches = {number: cache.without(names, changed) for number, cache in self._caches.items()}
        self._calls, self._strip_options = calls, strip_options
        return self._caches
