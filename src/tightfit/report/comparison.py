"""A call with lossy techniques beside the same call without: as text, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tightfit.report.summary import Report, align
from tightfit.schema.plan import TECHNIQUES, Plan
from tightfit.schema.results import PictureDifference, Trace
from tightfit.schema.step_cache import CacheTrace
from tightfit.units import format_bytes, format_seconds

__all__ = ["Comparison", "difference_words"]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two calls with the same seed, and how much their pictures differ. `str(comparison)` is a table for people."""

    reference: Report  # without lossy techniques
    lossy: Report
    pictures: tuple[PictureDifference, ...]  # of the lossy call; of a video, the mean over its frames
    notes: tuple[str, ...] = ()  # what to know of the reference, as sentences

    @property
    def mean(self) -> PictureDifference:
        """The mean over all pictures; that of the PSNR leaves out identical ones, and is infinite if all are."""
        differing = [picture.psnr for picture in self.pictures if picture.psnr != math.inf]
        return PictureDifference(
            fmean(differing) if differing else math.inf, fmean(picture.ssim for picture in self.pictures)
        )

    @property
    def speed(self) -> float:
        """How many times as fast as the reference the lossy call was."""
        return self.reference.trace.seconds / max(self.lossy.trace.seconds, 1e-9)

    @property
    def lossy_words(self) -> tuple[str, ...]:
        """What may have changed the pictures, each on a line; of step caches also how many steps they skipped."""
        plan, trace = self.lossy.plan, self.lossy.trace
        if not trace.lossy:
            return tuple(f"not used: {what}" for what in plan.lossy)
        caches = {f"step-cache: {cache.strategy} in {cache.component}": cache for cache in trace.caches}
        return tuple(_with_steps(what, caches.get(what), plan) for what in trace.lossy)

    @property
    def headline(self) -> str:
        """How much faster, and how different, on one line."""
        if all(picture.psnr == math.inf for picture in self.pictures):
            return f"{self.speed:.2f} × as fast, identical pictures"
        ratio, similarity = difference_words(self.mean)
        mean = "mean " if len(self.pictures) > 1 else ""
        return f"{self.speed:.2f} × as fast, {mean}PSNR {ratio}, SSIM {similarity}"

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, ready for JSON. The PSNR of identical pictures is null."""
        return {
            "pictures": [_mapping(picture) for picture in self.pictures],
            "mean": _mapping(self.mean),
            "speed": self.speed,
            "notes": list(self.notes),
            "reference": self.reference.to_mapping(),
            "lossy": self.lossy.to_mapping(),
        }

    def __str__(self) -> str:
        plain, lossy = self.reference.trace, self.lossy.trace
        rows = [
            ("", "lossless", "lossy"),
            ("seconds", format_seconds(plain.seconds), format_seconds(lossy.seconds)),
            ("peak", format_bytes(plain.peak_bytes), format_bytes(lossy.peak_bytes)),
            ("skipped steps", _skipped(plain), _skipped(lossy)),
        ]
        lines = [*align(rows), "", *align(self._pictures()), ""]
        lines += [_explained(what) for what in self.lossy_words]
        notes = dict.fromkeys((*self.notes, *plain.notes, *lossy.notes))
        return "\n".join([self.headline, "", *lines, *(f"note: {' '.join(note.split())}" for note in notes)])

    def __repr__(self) -> str:
        return f"<Comparison of {self.reference.trace} and {self.lossy.trace}>"

    def _pictures(self) -> Sequence[Sequence[str]]:
        named = [(f"picture {number}", each) for number, each in enumerate(self.pictures, 1)]
        named += [("mean", self.mean)] if len(named) > 1 else []
        return [("", "PSNR", "SSIM"), *((name, *difference_words(each)) for name, each in named)]


def difference_words(difference: PictureDifference) -> tuple[str, str]:
    """Return PSNR and SSIM as text.

    >>> difference_words(PictureDifference(psnr=31.417, ssim=0.98765))
    ('31.4 dB', '0.9877')
    >>> difference_words(PictureDifference(psnr=math.inf, ssim=1.0))
    ('identical', '1.0000')
    """
    return "identical" if difference.psnr == math.inf else f"{difference.psnr:.1f} dB", f"{difference.ssim:.4f}"


def _mapping(difference: PictureDifference) -> dict[str, Any]:
    identical = difference.psnr == math.inf
    return {"psnr": None if identical else difference.psnr, "ssim": difference.ssim, "identical": identical}


def _skipped(trace: Trace) -> str:
    """Return how many steps were skipped; where several components have a step cache, of all of their steps."""
    if not any(cache.skipped_steps for cache in trace.caches):
        return "0"
    return f"{sum(len(cache.skipped_steps) for cache in trace.caches)} of {sum(cache.steps for cache in trace.caches)}"


def _with_steps(what: str, cache: CacheTrace | None, plan: Plan) -> str:
    if cache is None:
        return what
    settings = plan.components[cache.component].cache
    said = settings.described.removeprefix("step cache ") if settings is not None else cache.strategy
    skipped = f"{len(cache.skipped_steps)} of {cache.steps} steps skipped"
    return f"step-cache: {said} in {cache.component}, {skipped}"


def _explained(what: str) -> str:
    name = what.partition(":")[0]
    return f"lossy: {what} ({TECHNIQUES[name]})" if name in TECHNIQUES else what
