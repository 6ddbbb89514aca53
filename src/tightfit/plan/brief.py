"""A plan → what it does with weights and autoencoder, in a few words: for a row of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tightfit.plan.streaming import resolve_streaming, weight_group_sizes
from tightfit.records import Component, ComponentPlan, Footprint, Plan, VaePlan
from tightfit.units import format_bytes

__all__ = ["summarize", "there_while_working"]

_LABELS = {"encoder": "encoders", "denoiser": "denoiser", "autoencoder": "VAE", "other": "others"}


def summarize(plan: Plan, footprint: Footprint) -> str:
    """What it does, e.g. "streams encoders 4 %, denoiser 12 %; strips": so much of their weights is there at a time.

    Who is not named is on the device all along.
    """
    streams, turns = [], []
    for role, components in _by_role(footprint).items():
        if any(plan.components[c.name].placement == "stream" for c in components):
            there = sum(_aboard(c, plan.components[c.name]) for c in components)
            share = _share(there, sum(c.bytes for c in components))
            streams.append(f"{_LABELS[role]} {share}{_whence(plan, components)}")
        elif any(plan.components[c.name].placement == "offload" for c in components):
            turns.append(_LABELS[role] + _whence(plan, components))
    said = [f"streams {', '.join(streams)}"] if streams else []
    said += [f"{', '.join(turns)} in turn"] if turns else []
    stored = sorted({c.storage for c in plan.components.values() if c.storage != "as-loaded"})
    return "; ".join([*said, *_cuts(plan.vae), *stored]) or "all on the card"


def there_while_working(plan: Plan, footprint: Footprint, role: str) -> str:
    """What of the components of `role` is on the device while they work, and for how long that is there."""
    components = _by_role(footprint).get(role, [])
    if not components:
        return "none"
    whole, there = sum(c.bytes for c in components), sum(_aboard(c, plan.components[c.name]) for c in components)
    placements = {plan.components[c.name].placement for c in components}
    if "stream" in placements:
        said = f"{format_bytes(there)} of {format_bytes(whole)}, streamed"
    else:
        said = f"{format_bytes(whole)}, " + ("all along" if placements == {"resident"} else "while at work")
    return "; ".join([said, *(_cuts(plan.vae) if role == "autoencoder" else ())])


def _by_role(footprint: Footprint) -> dict[str, list[Component]]:
    """Those that work in the call, in the order in which their roles come first."""
    used = dict.fromkeys(done.component for phase in footprint.phases for done in phase.calls)
    known = {component.name: component for component in footprint.components}
    roles: dict[str, list[Component]] = {}
    for name in used:
        roles.setdefault(known[name].role, []).append(known[name])
    return roles


def _whence(plan: Plan, components: Sequence[Component]) -> str:
    chosen = (plan.components[c.name] for c in components)
    return " from the disk" if any(c.placement != "resident" and c.offload_to == "disk" for c in chosen) else ""


def _aboard(component: Component, chosen: ComponentPlan) -> int:
    """Bytes of its weights on the device while it works, with the ring for what passes through."""
    if chosen.placement != "stream":
        return component.bytes
    settled = resolve_streaming(component, chosen)
    sizes = weight_group_sizes(component, settled.granularity or "layer", settled)
    loose = component.bytes - sum(leaf.bytes for leaf in component.layers)
    return min(
        loose + (settled.ring_buffer or 0) + sum(sizes[name] for name in settled.resident_layers or ()), component.bytes
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if 100 * part >= whole else "< 1 %"


def _cuts(vae: VaePlan) -> Iterator[str]:
    if vae.strips is not None:
        yield "strips" + {"device": "", "host": ", maps in RAM", "recompute": ", maps again"}[vae.feature_maps]
    if vae.tile is not None:
        yield f"tiles of {vae.tile} px"
