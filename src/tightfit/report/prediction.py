"""A Prediction → text or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tightfit.catalog.clock import seconds_range
from tightfit.report.summary import Report, align, fold_phases
from tightfit.schema.machine import Budget
from tightfit.schema.plan import Plan, Reason
from tightfit.schema.request import Request
from tightfit.schema.results import PhaseTrace, Prediction
from tightfit.units import format_bytes, format_seconds

__all__ = ["as_report", "describe", "to_mapping"]

_SURE = {
    "nominal": "by the card's data sheet",
    "measured": "by this computer's measured rates",
    "learned": "by what earlier runs took",
    "guessed": "a guess: nothing was measured here",
}
_LOSSLESS = "lossless: same numbers as with everything on the device"
_HEADINGS = ("phase", "seconds", "calls", "peak", "of which weights", "reserved")


def describe(prediction: Prediction, *, verbose: bool = False) -> str:
    """Return the text: a headline, a table of phases, and the plan's decisions; with `verbose`, kernels too."""
    trace, plan = prediction.trace, prediction.plan
    asked = plan.request or Request()
    said = [prediction.model, *([asked.described] if asked.described != Request().described else [])]
    said += [f"{prediction.steps} steps"] if prediction.steps else []
    said += [prediction.dtype] if prediction.dtype else []
    took = f"; predicted {_seconds_in_words(prediction)}, {_SURE[prediction.rates]}" if prediction.fits else ""
    return "\n".join(
        [
            f"{', '.join(said)}, on {prediction.card}: {_verdict(prediction)}{took}",
            *([prediction.would_fit] if prediction.would_fit else []),
            f"lossy: {'; '.join(trace.lossy)}" if trace.lossy else _LOSSLESS,
            "",
            *align([*_table(prediction)]),
            *_elsewhere(prediction),
            "",
            *(_in_words(plan, verbose) if plan.forecast else _by_fields(plan, verbose)),
            *(f"step cache: {cache.described}" for cache in trace.caches),
            *(f"note: {note}" for note in trace.notes),
        ]
    )


def _seconds_in_words(prediction: Prediction) -> str:
    """The time, with the range to expect on known cards."""
    within = _range(prediction)
    seconds = format_seconds(prediction.trace.seconds)
    return f"{seconds} ({_from_to(within)})" if within else seconds


def _from_to(within: tuple[float, float]) -> str:
    return " to ".join(map(format_seconds, within))


def _range(prediction: Prediction, phase: PhaseTrace | None = None) -> tuple[float, float] | None:
    """Lowest and highest seconds to expect of the call, or of all phases named as `phase`.

    None where it is not known how well times are predicted.
    """
    if prediction.rates != "nominal" or not prediction.fits:
        return None
    if phase is None:
        return seconds_range(prediction.trace.seconds, sum(prediction.host_seconds.values()))
    return seconds_range(phase.seconds, prediction.host_seconds.get(phase.name, 0.0))


def _in_words(plan: Plan, verbose: bool) -> Iterator[str]:
    """Decisions of a plan that was made for a budget, with their reasons."""
    yield "Decisions:"
    yield from (f"- {reason.decision}: {reason.because}" for reason in _shown(plan, verbose))


def _by_fields(plan: Plan, verbose: bool) -> Iterator[str]:
    """Fields of a plan that a user chose, then its reasons."""
    yield from (f"{name}: {chosen.described}" for name, chosen in plan.components.items())
    yield f"autoencoder: {plan.vae.described}"
    yield from (f"because: {reason.decision}: {reason.because}" for reason in _shown(plan, verbose))


def _shown(plan: Plan, verbose: bool) -> Iterator[Reason]:
    return (reason for reason in plan.reasons if verbose or not reason.detail)


def as_report(prediction: Prediction) -> Report:
    """Return the prediction as a Report, with the card's capacity as its budget, to draw its timeline."""
    budget = Budget(device=prediction.capacity)
    return Report(prediction.plan.model_copy(update={"budget": budget}), prediction.trace)


def _elsewhere(prediction: Prediction) -> Iterator[str]:
    """Lines on the peaks of other cards, which the table does not show."""
    for name, capacity in prediction.other_devices.items():
        peak, phase = _fullest(prediction, name)
        yield f"  {name} holds at most {format_bytes(peak)} of {format_bytes(capacity)}, in {phase}"


def _fullest(prediction: Prediction, name: str) -> tuple[int, str]:
    """Highest peak on another card in bytes, and its phase."""
    return max((phase.other_devices.get(name, 0), phase.name) for phase in prediction.trace.phases)


def _verdict(prediction: Prediction) -> str:
    need, has = format_bytes(prediction.needed_bytes), format_bytes(prediction.capacity)
    if not prediction.fits:
        others = ((name, _fullest(prediction, name)[0], size) for name, size in prediction.other_devices.items())
        short = [
            f", and {name} needs {format_bytes(peak)} of {format_bytes(size)}"
            for name, peak, size in others
            if peak > size
        ]
        return f"does not fit, it needs {need} and the card has {has} for tensors{''.join(short)}"
    return f"fits, {need} of {has}"


def _table(prediction: Prediction) -> Iterator[tuple[str, ...]]:
    """Headings and phases; no times if the plan does not fit, and only columns of what is known."""
    ranged, simulated = _range(prediction) is not None, prediction.simulated
    yield (*_HEADINGS[:2], *["likely"] * ranged, *_HEADINGS[2:], *["bytes in"] * simulated)
    for phase in fold_phases(prediction.trace.phases):
        within = _range(prediction, phase)
        sizes = (phase.peak_bytes, phase.peak_weights, phase.peak_reserved, *[phase.bytes_in] * simulated)
        yield (
            phase.name,
            format_seconds(phase.seconds) if prediction.fits else "-",
            *([_from_to(within)] if within else []),
            str(phase.runs),
            *map(format_bytes, sizes),
        )


def to_mapping(prediction: Prediction) -> dict[str, Any]:
    """Return plain values, ready for JSON."""
    trace = prediction.trace
    return {
        "fits": prediction.fits,
        "model": prediction.model,
        "card": prediction.card,
        "capacity_bytes": prediction.capacity,
        "other_devices": dict(prediction.other_devices),
        "simulated": prediction.simulated,
        "lossless": not trace.lossy,
        "predicted": {
            "peak_bytes": trace.peak_bytes,
            "needed_bytes": prediction.needed_bytes,
            "peak_reserved_bytes": prediction.peak_reserved,
            "seconds": trace.seconds if prediction.fits else None,
            "host_seconds": sum(prediction.host_seconds.values()) if prediction.fits else None,
            "seconds_range": _range(prediction),
            "rates": prediction.rates,
        },
        "sent_bytes": prediction.sent_bytes,
        "dtype": prediction.dtype,
        "would_fit": prediction.would_fit,
        "phases": [
            {
                "name": phase.name,
                "predicted_peak_bytes": phase.peak_bytes,
                "predicted_peak_weights": phase.peak_weights,
                "predicted_reserved_bytes": phase.peak_reserved,
                "other_devices": dict(phase.other_devices),
                "seconds": phase.seconds,
                "host_seconds": prediction.host_seconds.get(phase.name, 0.0),
                "seconds_range": _range(prediction, phase),
                "bytes_in": phase.bytes_in if prediction.simulated else None,
                "bytes_out": phase.bytes_out if prediction.simulated else None,
                "runs": phase.runs,
            }
            for phase in fold_phases(trace.phases)
        ],
        "caches": [cache.to_mapping() for cache in trace.caches],
        "plan": prediction.plan.to_mapping(),
        "reasons": [reason.to_mapping() for reason in prediction.plan.reasons],
    }
