"""Footprint with unmeasured parts → the parts that are worth measuring, because a plan could improve with them.

The search assumes the best case: unmeasured parts take no memory. For strips the bound is tighter: strips of fewer
bytes, or with feature maps in host memory, are no faster than the others, and the others need no less memory. Parts
with which no plan improves even then need not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightfit.plan.device_search import DeviceSearch
from tightfit.schema.footprint import STRIP_OPTIONS, FeatureMaps, Footprint, Phase

__all__ = ["GAIN", "missing_parts"]

GAIN = 0.001  # fraction of a call's time: for a smaller gain nothing more is measured


def missing_parts(
    footprint: Footprint, search: Callable[[Footprint], DeviceSearch], size: int, ram: int | None
) -> tuple[str, ...]:
    """Return the unmeasured parts of `footprint` that could improve a plan within `size` device and `ram` host bytes.

    The plan could be faster or, if nothing fits, need fewer bytes than is known now. Measure the first part first:
    afterwards fewer of the others may be missing. `search` returns the search over all options of a footprint.
    """
    current = search(footprint)
    variants = [part for part in footprint.not_measured if part not in STRIP_OPTIONS]
    strips = [
        part
        for part in footprint.not_measured
        if part in STRIP_OPTIONS and (STRIP_OPTIONS[part][1] == "device" or not current.device.is_cpu)
    ]
    everything = search(_best_case(footprint, [*variants, *strips]))
    fastest = everything.best(size, ram)
    best = everything.min_bytes(ram) if fastest is None else (1 + GAIN) * fastest.seconds

    def enough(parts: Sequence[str], *, likely: bool = False) -> bool:
        """Whether a plan could be as good with these parts alone as with all, or is `likely` to be."""
        some = search(_best_case(footprint, parts, likely=likely))
        if fastest is None:
            return some.min_bytes(ram) <= best
        found = some.best(size, ram)
        return found is not None and found.seconds <= best

    if enough([]):
        return ()
    if enough(variants):
        return tuple(variants)
    others, smallest = [] if enough(strips) else variants, strips[-1]
    if fastest is None:  # the option that needs the fewest bytes
        return (smallest, *others)
    first = next((part for part in strips if enough([part, *others], likely=True)), smallest)
    return (first, *others)


def _best_case(footprint: Footprint, parts: Sequence[str], *, likely: bool = False) -> Footprint:
    """Return `footprint` with these unmeasured `parts` as good as they can be, or as they are `likely` to be."""
    roles, denoising = {each.name: each.role for each in footprint.components}, set(footprint.denoiser_phases)
    strips = [STRIP_OPTIONS[part] for part in parts if part in STRIP_OPTIONS]

    def changed(place: int, phase: Phase) -> Phase:
        if place in denoising:
            return phase.model_copy(update={"allocator_bytes": 0}) if "variants" in parts else phase
        works = {(call.component, call.method) for call in phase.calls}
        in_strips = len(works) == 1 and roles[phase.calls[0].component] == "autoencoder"
        return _in_strips(phase, strips, likely=likely) if in_strips else phase

    phases = tuple(changed(place, phase) for place, phase in enumerate(footprint.phases))
    return footprint.model_copy(update={"phases": phases})


def _in_strips(phase: Phase, limits: Sequence[tuple[int, FeatureMaps]], *, likely: bool) -> Phase:
    """Return `phase` with the best case of unmeasured strip options, bounded by its measured ones.

    `limits` are the (divisor, feature maps) pairs of these options. Each is taken to be as fast as the slowest measured
    option that is no slower, or as no strips at all, with fewer bytes. If `likely`, it also needs as many bytes beside
    its strips as the measured options do.
    """
    strip_options, allocator_bytes = list(phase.strip_options), phase.allocator_bytes
    kept = (
        max(
            (
                strip_option.allocator_bytes - phase.live_bytes_at_start - strip_option.strip_bytes
                for strip_option in strip_options
            ),
            default=0,
        )
        if likely
        else 0
    )
    for divisor, maps in limits:
        strips = phase.strip_limit(divisor)
        leaner = [
            strip_option
            for strip_option in phase.strip_options
            if strip_option.strip_bytes <= strips and (strip_option.feature_maps, maps) != ("device", "host")
        ]
        faster = [
            strip_option
            for strip_option in phase.strip_options
            if strip_option.strip_bytes >= strips and (strip_option.feature_maps, maps) != ("host", "device")
        ]
        least = max(
            [
                phase.live_bytes_at_start + kept + strips,
                phase.peak_between_calls,
                *(strip_option.allocator_bytes for strip_option in leaner),
            ]
        )
        if faster:
            like = phase.strip_options.index(
                min(faster, key=lambda strip_option: (strip_option.strip_bytes, strip_option.feature_maps == "device"))
            )
            strip_options[like] = strip_options[like].model_copy(
                update={"allocator_bytes": min(strip_options[like].allocator_bytes, least), "host_bytes": 0}
            )
        else:
            allocator_bytes = min(allocator_bytes, least)
    return phase.model_copy(update={"strip_options": tuple(strip_options), "allocator_bytes": allocator_bytes})
