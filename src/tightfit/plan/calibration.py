"""A call that was made under a budget's plan → what it teaches; what such calls taught → a corrected Footprint.

What is learned of a phase is one factor for all that is computed in it, its pace, and the bytes that its activations
want more than was said. Neither depends on a budget, and each is a property of the footprint that the planner is
given: so whatever holds of its plans holds of those too that stand on experience.

Pace. Copies take as long as the link says; only arithmetic and launches are slower or faster than rates say. So what
was measured is explained by playing the same plan's forecast once more at another pace, until it takes as long. Where
less than half of a phase's time follows its arithmetic, it waits for weights, and tells nothing about arithmetic.
Nor does a phase with few passes in a first call, where a process loads kernels and chooses among them, or on a device
that is still busy when the host goes on to the next phase. What looks like a faster device may be weights that came
ahead of their phase, in later calls, or kernels that were launched during the one before: so faster is believed only of
phases with several passes (on a CPU, of any), and in later calls only where nothing comes.

Bytes. A peak within what was said teaches nothing: that is what the margin is for. One above it does, and never less
than by the highest of all calls: nothing ever shrinks.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tightfit.plan.component_cost import up
from tightfit.plan.forecast import PhaseEstimate, most_weights, needed_bytes, simulate
from tightfit.plan.options import variant_of
from tightfit.schema.footprint import Footprint, Phase
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan, Reason, Storage
from tightfit.schema.results import CallMeasurement, PhaseMeasurement, PhaseTrace, Trace
from tightfit.units import format_bytes

__all__ = ["SEVERAL", "CalibratedFootprint", "calibrate", "measurement_of", "most_beside", "stored_in"]

Seen = TypeVar("Seen", PhaseTrace, PhaseMeasurement)

SEVERAL = 4  # passes, among which what is done once does not weigh much
NOTABLE = 0.02  # a pace that differs by less is the one that rates say
MOST = 64.0  # times as long, or as short: what is beyond has other causes
EXACT = 1e-3
STEP, SHARE = 0.02, 0.5  # where that much longer arithmetic makes a phase longer by less than this share of it, …


class CalibratedFootprint(NamedTuple):
    """What a plan is made from, and why that is not what shapes and rates alone say."""

    footprint: Footprint
    reasons: tuple[Reason, ...]


# what a call teaches


def measurement_of(
    footprint: Footprint,
    plan: Plan,
    device: Accelerator,
    trace: Trace,
    disk_rate: float | None = None,
    *,
    spread: bool = False,
) -> CallMeasurement:
    """What `trace` teaches of a call as `footprint` tells of it, which kept to `plan` on `device` all along.

    `footprint` is as it was measured, and `device` has rates. `spread` says that only phases with several passes tell
    their times: the device runs behind the host.
    """
    footprint = footprint.with_variant(variant_of(footprint, plan))
    told, first, measured_phase = simulate(footprint, plan, device, disk_rate), trace.call == 1, []
    for number, seen in _matched(footprint, trace.phases):
        phase = footprint.phases[number]
        several = len(phase.call_order) >= SEVERAL
        time_scale = None
        if seen.runs == len(phase.call_order) and (several or not (first or spread)):
            time_scale = _cost_model(_player(footprint, number, plan, device, disk_rate), seen.seconds)
            if (
                time_scale is not None
                and time_scale < 1
                and not ((several or device.is_cpu) and (first or _resident(phase, plan)))
            ):
                time_scale = None
        ahead = told[number + 1 : number + 2] if not first else ()
        more = _more(told[number], seen.peak_bytes, device, ahead) if trace.other_bytes <= most_beside(device) else 0
        measured_phase.append(
            PhaseMeasurement(
                name=phase.name, runs=seen.runs, predicted_seconds=told[number].seconds, seconds=seen.seconds,
                predicted_bytes=told[number].peak(device), peak_bytes=seen.peak_bytes,
                activations=max(seen.peak_bytes - seen.peak_weights, 0), peak_reserved=seen.peak_reserved,
                time_scale=time_scale, extra_bytes=more,
            )
        )  # fmt: skip
    return CallMeasurement(plan=_digest(plan), first_call=first, stored=stored_in(plan), phases=tuple(measured_phase))


def stored_in(plan: Plan) -> dict[str, Storage]:
    """Components whose weights are not as loaded: widening them is work that a footprint does not tell of."""
    return {name: part.storage for name, part in plan.components.items() if part.storage != "as-loaded"}


def most_beside(device: Accelerator) -> int:
    """Bytes that others may have on `device`, cuBLAS's workspace among them, without disturbing what is seen."""
    return needed_bytes(0, 0, device)


def _digest(plan: Plan) -> str:
    decided = plan.model_copy(update={"reasons": (), "forecast": (), "budget": None})
    return hashlib.sha256(decided.to_json().encode()).hexdigest()[:16]


def _matched(footprint: Footprint, seen: Sequence[Seen]) -> Iterator[tuple[int, Seen]]:
    """What was seen of the phases that `footprint` tells of, by number: the nth of a name is the nth of that name."""
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
    """Whether no weights come for any of its passes."""
    return all(plan.components[done.component].placement == "resident" for done in phase.calls)


def _more(told: PhaseEstimate, peak: int, device: Accelerator, ahead: Sequence[PhaseEstimate]) -> int:
    """The bytes for activations by which a forecast says `peak`, and no segment more; 0 where it says as much.

    Weights that come `ahead` for the next phase come into what this one gives up: both take no more than the larger.
    """
    own = told.peak(device)
    peak -= max([0, *(one.peak(device) - own for one in ahead)])
    if peak <= own:
        return 0
    return max(most_weights(up(peak), told.room, device) - told.weights, 0)


def _player(
    footprint: Footprint, number: int, plan: Plan, device: Accelerator, disk_rate: float | None
) -> Callable[[float], float]:
    """The seconds of a phase at a pace."""
    before, phase = footprint.phases[:number], footprint.phases[number]

    def seconds(time_scale: float) -> float:
        tried = footprint.model_copy(update={"phases": (*before, _paced(phase, time_scale))})
        return simulate(tried, plan, device, disk_rate)[number].seconds

    return seconds


def _cost_model(played: Callable[[float], float], seconds: float) -> float | None:
    """The pace at which a phase takes `seconds`; None where it does not tell.

    Copies take their time at any pace, so a phase that is n times as long computes at least n times as long, and one
    that is shorter is so for at least as much faster arithmetic: that is one bound.
    """
    plain = played(1.0)
    if not plain or not 1 / MOST < seconds / plain < MOST:
        return None

    def follows(time_scale: float, there: float) -> bool:
        return played(time_scale * (1 + STEP)) - there >= SHARE * STEP * there

    guess = seconds / plain
    if guess >= 1 and not follows(1.0, plain):  # the slower it computes, the more it does
        return None
    if abs(played(guess) / seconds - 1) <= EXACT:
        return guess
    low, high = (guess, MOST) if guess >= 1 else (1 / MOST, guess)
    if not played(low) <= seconds <= played(high):
        return None
    while high / low > 1 + EXACT:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if played(middle) >= seconds else (middle, high)
    return high if guess >= 1 or follows(high, seconds) else None


# what is made of it


def calibrate(
    footprint: Footprint, experiences: Sequence[CallMeasurement], stored: Mapping[str, Storage]
) -> CalibratedFootprint:
    """`footprint` as calls with components `stored` like that have shown it to be.

    A pace is the median of all calls that tell one, without first calls where there are others; of two in the middle
    the lesser: what disturbs a call makes it longer.
    """
    working = {done.component for phase in footprint.phases for done in phase.calls}
    storages = {name: storage for name, storage in stored.items() if name in working}
    alike = [each for each in experiences if each.stored == storages]
    changes, reasons, told = dict[int, tuple[float, int]](), list[Reason](), True
    for number, phase in enumerate(footprint.phases):
        measured_phase = [
            (each.first_call, one) for each in alike for at, one in _matched(footprint, each.phases) if at == number
        ]
        time_scales = [one.time_scale for first, one in measured_phase if one.time_scale and not first]
        time_scales = time_scales or [one.time_scale for _, one in measured_phase if one.time_scale]
        told = told and bool(time_scales)
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
    if alike and not reasons:
        decision = "times and bytes are what rates and shapes say" if told else "no more bytes than shapes say"
        reasons.append(Reason(decision=decision, because=_in(alike)))
    return CalibratedFootprint(_changed(footprint, changes), tuple(reasons))


def _changed(footprint: Footprint, changes: Mapping[int, tuple[float, int]]) -> Footprint:
    """`footprint` with the pace and the bytes more of each phase by number, however denoisers work."""

    def change(number: int, phase: Phase) -> Phase:
        time_scale, more = changes[number]
        return (
            _roomier(_paced(phase, time_scale) if time_scale != 1.0 else phase, more)
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


def _paced(phase: Phase, time_scale: float) -> Phase:
    """`phase` with all that is computed, and launched, taking `time_scale` times as long."""
    passes = tuple(done.model_copy(update={"time_scale": time_scale}) for done in phase.calls)
    return phase.model_copy(update={"calls": passes})


def _roomier(phase: Phase, more: int) -> Phase:
    """`phase` with `more` bytes for activations, however it works."""
    ways = tuple(way.model_copy(update={"allocator_bytes": way.allocator_bytes + more}) for way in phase.strip_options)
    return phase.model_copy(update={"allocator_bytes": phase.allocator_bytes + more, "strip_options": ways})
