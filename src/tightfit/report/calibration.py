"""A calibration of step caches → text."""

from __future__ import annotations

from tightfit.schema.cache_calibration import CacheCalibration, CacheTrial
from tightfit.units import format_bytes

__all__ = ["calibration_text"]


def calibration_text(found: CacheCalibration) -> str:
    """Return a table of the trials, those first that took least time."""
    calls = f"{found.calls} calls" if found.calls > 1 else "one call"
    head = f"{calls} of {found.steps} steps; PSNR to the pictures without a step cache; time of denoising"
    if not found.trials:
        return f"{head}: no step cache that was tried skips a step, or fits"
    rows = [_row(each, found.steps) for each in sorted(found.trials, key=lambda each: each.seconds_share)]
    rows.insert(0, ("step cache", "least PSNR", "mean PSNR", "skipped", "time", "kept"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([head, *lines])


def _row(trial: CacheTrial, steps: int) -> tuple[str, ...]:
    return (
        trial.cache.brief,
        _psnr(trial.least_psnr),
        _psnr(trial.mean_psnr),
        f"{trial.mean_skipped:g} of {steps}",
        f"{trial.seconds_share:.0%}",
        format_bytes(trial.device_bytes + trial.host_bytes),
    )


def _psnr(ratio: float | None) -> str:
    return "the same" if ratio is None else f"{ratio:.1f} dB"
