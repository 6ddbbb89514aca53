"""Trace of a call under a budget's plan → CallMeasurement; CallMeasurements → a corrected Footprint.

Two values are learned of a phase: a factor on the time of its arithmetic and launches (`time_scale`), and the bytes
that its activations need beyond the prediction (`extra_bytes`). Neither depends on a budget, and both are properties
of the footprint given to the planner: so whatever holds of its plans also holds of plans from corrected footprints.

Time scale. Copies take as long as the link's rate says; only arithmetic and launches are slower or faster than rates
say. So the same plan's forecast is simulated with other time scales until it takes as long as was measured. If less
than half of a phase's time follows its arithmetic, it waits for weights and shows nothing about arithmetic. Nor does
a phase of few component calls in a first call, where a process loads kernels and chooses among them, or on a device
that is still busy when the host goes on to the next phase. What looks like a faster device may be weights that were
loaded ahead of their phase, in later calls, or kernels that were launched during the phase before: so a scale below 1
is accepted only of phases with several component calls (on a CPU, of any), and in later calls only if all weights are
resident.

Bytes. A peak within the prediction teaches nothing: the margin is for that. From peaks above it the largest excess of
all calls is taken, so that it never shrinks.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tightfit.plan.component_cost import round_up
from tightfit.plan.forecast import PhaseEstimate, most_weights, needed_bytes, simulate
from tightfit.plan.options import variant_of
from tightfit.schema.footprint import Footprint, Phase
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan, Reason, Storage
from tightfit.schema.results import CallMeasurement, PhaseMeasurement, PhaseTrace, Trace
from tightfit.schema.stores import NO_RATES, StoreRates
from tightfit.units import format_bytes

__all__ = ["SEVERAL", "CalibratedFootprint", "calibrate", "max_other_bytes", "measurement_of", "stored_in"]

Seen = TypeVar("Seen", PhaseTrace, PhaseMeasurement)

SEVERAL = 4  # component calls of a phase from which on one-time work has little weight
NOTABLE = 0.02  # a time scale within this of 1 is taken as 1
MOST = 64.0  # largest factor between measured and predicted time, either way: beyond it there are other causes
EXACT = 1e-3  # relative precision of a time scale
STEP, SHARE = 0.02, 0.5  # a phase follows its arithmetic if STEP more of that makes it longer by SHARE × STEP or more


class CalibratedFootprint(NamedTuple):
    """A footprint to plan with, and the reasons why it differs from what shapes and rates alone give."""

    footprint: Footprint
    reasons: tuple[Reason, ...]


# trace → measurement


def measurement_of(
    footprint: Footprint,
    plan: Plan,
    device: Accelerator,
    trace: Trace,
    store_rates: StoreRates = NO_RATES,
    *,
    spread: bool = False,
) -> CallMeasurement:
    """Return the measurement of a pipeline call with `footprint` that followed `plan` on `device`, from its `trace`.

    `footprint` is uncorrected, and `device` has all rates. With `spread`, only phases of at least `SEVERAL` component
    calls get a time scale, because the device runs behind the host.
    """
    footprint = footprint.with_variant(variant_of(footprint, plan))
    estimates, first, measured_phase = simulate(footprint, plan, device, store_rates), trace.call == 1, []
    for number, seen in _matched(footprint, trace.phases):
        phase = footprint.phases[number]
        several = len(phase.call_order) >= SEVERAL
        time_scale = None
        if seen.runs == len(phase.call_order) and (several or not (first or spread)):
            time_scale = _find_time_scale(_seconds_at(footprint, number, plan, device, store_rates), seen.seconds)
            if (
                time_scale is not None
                and time_scale < 1
                and not ((several or device.is_cpu) and (first or _resident(phase, plan)))
            ):
                time_scale = None
        ahead = estimates[number + 1 : number + 2] if not first else ()
        more = (
            _extra_bytes(estimates[number], seen.peak_bytes, device, ahead)
            if trace.other_bytes <= max_other_bytes(device)
            else 0
        )
        measured_phase.append(
            PhaseMeasurement(
                name=phase.name, runs=seen.runs, predicted_seconds=estimates[number].seconds, seconds=seen.seconds,
                predicted_bytes=estimates[number].peak(device), peak_bytes=seen.peak_bytes,
                activations=max(seen.peak_bytes - seen.peak_weights, 0), peak_reserved=seen.peak_reserved,
                time_scale=time_scale, extra_bytes=more,
            )
        )  # fmt: skip
    return CallMeasurement(plan=_digest(plan), first_call=first, stored=stored_in(plan), phases=tuple(measured_phase))


def stored_in(plan: Plan) -> dict[str, Storage]:
    """Return the storage of components whose weights are not as loaded: a footprint does not include widening them."""
    return {name: part.storage for name, part in plan.components.items() if part.storage != "as-loaded"}


def max_other_bytes(device: Accelerator) -> int:
    """Return the bytes that other tensors may take of `device`, cuBLAS's workspace included, in a valid measurement."""
    return needed_bytes(0, 0, device)


def _digest(plan: Plan) -> str:
    decided = plan.model_copy(update={"reasons": (), "forecast": (), "budget": None})
    return hashlib.sha256(decided.to_json().encode()).hexdigest()[:16]


def _matched(footprint: Footprint, seen: Sequence[Seen]) -> Iterator[tuple[int, Seen]]:
    """Yield each measured phase with its index in `footprint`: the nth of a name is the nth of that name there."""
    numbers = {key: number for number, key in enumerate(_counted(phase.name for phase in footprint.phases))}
    for key, one in zip(_counted(one.name for one in seen), seen, strict=True):
        if key in numbers:
            yield numbers[key], one


def _counted(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    times: Counter[str] = Counter()
    for name in names:
        yield name, times[name]
        times[name] += 1


def _resident(phase: Phase, plan: Plan) -> bool:
    """Whether the weights of all its components are resident."""
    return all(plan.components[call.component].placement == "resident" for call in phase.calls)


def _extra_bytes(estimate: PhaseEstimate, peak: int, device: Accelerator, ahead: Sequence[PhaseEstimate]) -> int:
    """Return the activation bytes with which the forecast is `peak`, and no segment more; 0 if it already is as high.

    Weights loaded `ahead` for the next phase use memory that this one releases: both take no more than the larger.
    """
    own = estimate.peak(device)
    peak -= max([0, *(one.peak(device) - own for one in ahead)])
    if peak <= own:
        return 0
    return max(most_weights(round_up(peak), estimate.allocator_bytes, device) - estimate.weights, 0)


def _seconds_at(
    footprint: Footprint, number: int, plan: Plan, device: Accelerator, store_rates: StoreRates
) -> Callable[[float], float]:
    """Return a function from a time scale to the predicted seconds of a phase."""
    before, phase = footprint.phases[:number], footprint.phases[number]

    def seconds(time_scale: float) -> float:
        tried = footprint.model_copy(update={"phases": (*before, _with_time_scale(phase, time_scale))})
        return simulate(tried, plan, device, store_rates)[number].seconds

    return seconds


def _find_time_scale(simulated: Callable[[float], float], seconds: float) -> float | None:
    """Return the time scale at which a phase takes `seconds`; None if it cannot be determined.

    Copies take the same time at any scale. So if a phase takes n times as long as predicted, its arithmetic takes at
    least n times as long; if it is shorter, its arithmetic is faster by at least that factor. This is one bound.
    """
    plain = simulated(1.0)
    if not plain or not 1 / MOST < seconds / plain < MOST:
        return None

    def follows(time_scale: float, before: float) -> bool:
        return simulated(time_scale * (1 + STEP)) - before >= SHARE * STEP * before

    guess = seconds / plain
    if guess >= 1 and not follows(1.0, plain):  # the larger the scale, the more it follows
        return None
    if abs(simulated(guess) / seconds - 1) <= EXACT:
        return guess
    low, high = (guess, MOST) if guess >= 1 else (1 / MOST, guess)
    if not simulated(low) <= seconds <= simulated(high):
        return None
    while high / low > 1 + EXACT:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if simulated(middle) >= seconds else (middle, high)
    return high if guess >= 1 or follows(high, seconds) else None


# measurements → footprint


def calibrate(
    footprint: Footprint, measurements: Sequence[CallMeasurement], stored: Mapping[str, Storage]
) -> CalibratedFootprint:
    """Return `footprint` corrected by the measured calls whose components were `stored` in the same way.

    A time scale is the median over all pipeline calls that give one, without first calls if there are others. Of two
    in the middle it is the smaller: disturbances make a call longer.
    """
    working = {call.component for phase in footprint.phases for call in phase.calls}
    storages = {name: storage for name, storage in stored.items() if name in working}
    same_storage = [each for each in measurements if each.stored == storages]
    changes, reasons, timed = dict[int, tuple[float, int]](), list[Reason](), True
    for number, phase in enumerate(footprint.phases):
        measured_phase = [
            (each.first_call, one)
            for each in same_storage
            for at, one in _matched(footprint, each.phases)
            if at == number
        ]
        time_scales = [one.time_scale for first, one in measured_phase if one.time_scale and not first]
        time_scales = time_scales or [one.time_scale for _, one in measured_phase if one.time_scale]
        timed = timed and bool(time_scales)
        time_scale = statistics.median_low(time_scales) if time_scales else 1.0
        time_scale = time_scale if abs(time_scale - 1) > NOTABLE else 1.0
        if time_scale != 1.0:
            reasons.append(
                Reason(
                    decision=f"times of {phase.name} are {time_scale:.3g} × what rates say", because=_in(time_scales)
                )
            )
        more = [one.extra_bytes for _, one in measured_phase if one.extra_bytes]
        changes[number] = time_scale, max(more, default=0)
        if more:
            decision = f"{phase.name} takes {format_bytes(max(more))} more than shapes say"
            reasons.append(Reason(decision=decision, because=_in(more)))
    if same_storage and not reasons:
        decision = "times and bytes are what rates and shapes say" if timed else "no more bytes than shapes say"
        reasons.append(Reason(decision=decision, because=_in(same_storage)))
    return CalibratedFootprint(_changed(footprint, changes), tuple(reasons))


def _changed(footprint: Footprint, changes: Mapping[int, tuple[float, int]]) -> Footprint:
    """Return `footprint` with the time scale and extra bytes of each phase, by index, in all variants."""

    def change(number: int, phase: Phase) -> Phase:
        time_scale, more = changes[number]
        return (
            _with_extra_bytes(_with_time_scale(phase, time_scale) if time_scale != 1.0 else phase, more)
            if (time_scale, more) != (1.0, 0)
            else phase
        )

    places = footprint.denoiser_phases
    variants = (
        variant.model_copy(update={"phases": tuple(map(change, places, variant.phases))})
        for variant in footprint.variants
    )
    phases = tuple(change(number, phase) for number, phase in enumerate(footprint.phases))
    return footprint.model_copy(update={"phases": phases, "variants": tuple(variants)})


def _in(runs: Sequence[object]) -> str:
    return f"measured in {len(runs)} run{'s' * (len(runs) > 1)} on this machine"


def _with_time_scale(phase: Phase, time_scale: float) -> Phase:
    """Return `phase` with arithmetic and launches taking `time_scale` times as long."""
    passes = tuple(call.model_copy(update={"time_scale": time_scale}) for call in phase.calls)
    return phase.model_copy(update={"calls": passes})


def _with_extra_bytes(phase: Phase, more: int) -> Phase:
    """Return `phase` with `more` bytes for activations, in each of its strip options too."""
    strip_options = tuple(
        profile.model_copy(update={"allocator_bytes": profile.allocator_bytes + more})
        for profile in phase.strip_options
    )
    return phase.model_copy(update={"allocator_bytes": phase.allocator_bytes + more, "strip_options": strip_options})
