"""What a footprint leaves out → what of it a plan could gain by.

A plan is at its best if what was not measured took no memory. Of strips more is known: those of fewer bytes, or with
maps in host memory, are no faster than others, and those others need no less room. What a plan would gain nothing by
even so need not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightfit.plan.device_search import DeviceSearch
from tightfit.schema.footprint import STRIPS, FeatureMaps, Footprint, Phase

__all__ = ["GAIN", "missing_parts"]

GAIN = 0.001  # of a call's time: less is not worth measuring more


def missing_parts(
    footprint: Footprint, search: Callable[[Footprint], DeviceSearch], size: int, ram: int | None
) -> tuple[str, ...]:
    """What `footprint` leaves out and a plan within `size` bytes of the device and `ram` of host memory could gain by.

    It could be faster, or where nothing fits, do with less than what is known now. The first of them is to be measured
    first: when it is, less of the others may be missing. `search` looks through what could be done in a call.
    """
    now = search(footprint)
    variants = [part for part in footprint.not_measured if part not in STRIPS]
    strips = [
        part
        for part in footprint.not_measured
        if part in STRIPS and (STRIPS[part][1] == "device" or not now.device.is_cpu)
    ]
    everything = search(_at_best(footprint, [*variants, *strips]))
    fastest = everything.best(size, ram)
    best = everything.least(ram) if fastest is None else (1 + GAIN) * fastest.seconds

    def enough(parts: Sequence[str], *, likely: bool = False) -> bool:
        """Whether with these alone a plan could be as good as with all, or is `likely` to be."""
        some = search(_at_best(footprint, parts, likely=likely))
        if fastest is None:
            return some.least(ram) <= best
        found = some.best(size, ram)
        return found is not None and found.seconds <= best

    if enough([]):
        return ()
    if enough(variants):
        return tuple(variants)
    others, smallest = [] if enough(strips) else variants, strips[-1]
    if fastest is None:  # what would do with least
        return (smallest, *others)
    first = next((part for part in strips if enough([part, *others], likely=True)), smallest)
    return (first, *others)


def _at_best(footprint: Footprint, parts: Sequence[str], *, likely: bool = False) -> Footprint:
    """`footprint` as if these `parts` of what it leaves out were as good as they can be, or as they are `likely` to."""
    roles, denoising = {each.name: each.role for each in footprint.components}, set(footprint.denoiser_phases)
    strips = [STRIPS[part] for part in parts if part in STRIPS]

    def changed(place: int, phase: Phase) -> Phase:
        if place in denoising:
            return phase.model_copy(update={"allocator_bytes": 0}) if "variants" in parts else phase
        works = {(done.component, done.method) for done in phase.calls}
        in_strips = len(works) == 1 and roles[phase.calls[0].component] == "autoencoder"
        return _in_strips(phase, strips, likely=likely) if in_strips else phase

    phases = tuple(changed(place, phase) for place, phase in enumerate(footprint.phases))
    return footprint.model_copy(update={"phases": phases})


def _in_strips(phase: Phase, some: Sequence[tuple[int, FeatureMaps]], *, likely: bool) -> Phase:
    """`phase` with what strips of some shares of it, and places of their maps, are at best, by those that it has.

    They are like the slowest of those that are no slower, or like no strips at all, with less room. It is `likely`
    that beside them is kept as much as beside others.
    """
    ways, room = list(phase.strip_options), phase.allocator_bytes
    kept = (
        max((way.allocator_bytes - phase.live_bytes_at_start - way.strip_bytes for way in ways), default=0)
        if likely
        else 0
    )
    for share, maps in some:
        strips = phase.strip_bytes(share)
        leaner = [
            way
            for way in phase.strip_options
            if way.strip_bytes <= strips and (way.feature_maps, maps) != ("device", "host")
        ]
        faster = [
            way
            for way in phase.strip_options
            if way.strip_bytes >= strips and (way.feature_maps, maps) != ("host", "device")
        ]
        least = max(
            [
                phase.live_bytes_at_start + kept + strips,
                phase.peak_between_calls,
                *(way.allocator_bytes for way in leaner),
            ]
        )
        if faster:
            like = phase.strip_options.index(
                min(faster, key=lambda way: (way.strip_bytes, way.feature_maps == "device"))
            )
            ways[like] = ways[like].model_copy(
                update={"allocator_bytes": min(ways[like].allocator_bytes, least), "host_bytes": 0}
            )
        else:
            room = min(room, least)
    return phase.model_copy(update={"strip_options": tuple(ways), "allocator_bytes": room})
