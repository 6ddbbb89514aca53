"""A plan → why each of its decisions was made: one short sentence each, with the number where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tightfit.plan.attention import foresee
from tightfit.plan.layout import LayoutChoice
from tightfit.records import Accelerator, Component, ComponentPlan, Footprint, Plan, Reason, VaePlan
from tightfit.units import format_bytes

__all__ = ["explain"]

Said = Iterator[tuple[str, str]]  # decision and reason; with {} for the components that share both
Parts = Sequence[tuple[Component, ComponentPlan]]
_MAPS = {
    "device": ("stay on the device", "nothing is copied, and nothing computed twice"),
    "host": ("wait in host memory", "the device's is left to the strips; each map crosses the link twice"),
    "recompute": ("wait as far as they fit", "they have as many bytes as the strips; the rest is computed again"),
}


def explain(
    plan: Plan,
    footprint: Footprint,
    layouts: Mapping[str, LayoutChoice],
    *,
    separate: bool,
    moves: bool = True,
    accelerator: Accelerator | None = None,
) -> tuple[Reason, ...]:
    """The reasons for all that `plan`, as it was wished for, decides of the pipeline with this `footprint`.

    `layouts` has what was chosen for each component. Where the device has no memory of its own (it is not `separate`),
    the reasons say what does not move; without `moves`, nothing is said of what does. What is known of the
    `accelerator` tells who computes attention; without it, nothing is said about that.
    """
    parts = [(component, plan.components[component.name]) for component in footprint.components]
    told: dict[tuple[str, str], list[str]] = {}
    for said in _pictures(plan.vae, separate=separate):
        told[said] = []
    for component, chosen in parts:
        for said in _inside(component, chosen, layouts[component.name], separate=separate):
            told.setdefault(said, []).append(component.name)
    for said in _moves(plan, parts, separate=separate) if moves else ():
        told[said] = []
    for component, chosen in parts:
        for said in foresee(component, chosen, accelerator):
            told.setdefault(said, []).append(component.name)
    return tuple(
        Reason(decision=decision.replace("{}", ", ".join(names), 1) if names else decision, because=because)
        for (decision, because), names in told.items()
    )


def _pictures(vae: VaePlan, *, separate: bool) -> Said:
    """How autoencoders work through pictures."""
    peak = "an autoencoder's maps at full resolution are the peak of a large picture"
    if vae.strips:
        yield f"strips within {format_bytes(vae.strips)}", f"{peak}; in strips the numbers stay"
        wait, why = _MAPS["device" if vae.feature_maps == "host" and not separate else vae.feature_maps]
        yield f"maps between strips {wait}", why
    if vae.tile:
        where, why = (" where strips cannot be", "that is less than a whole picture") if vae.strips else ("", peak)
        yield f"tiles of {vae.tile} px{where}", why
    if vae.slicing:
        yield "one item at a time", "decoding a batch together multiplies the peak and gains no time"


def _inside(component: Component, chosen: ComponentPlan, layout: LayoutChoice, *, separate: bool) -> Said:
    """In what form a component is, and how it works."""
    streams = chosen.placement == "stream" and (separate or chosen.offload_to == "disk")
    once = "; block by block, so that weights come once" if streams else ""
    if chosen.storage != "as-loaded":
        size = 4 if component.main_dtype == "float32" else 2
        why = f"asked for by name: most weights take one byte instead of {size}, and numbers change slightly"
        yield f"{{}} stored in {chosen.storage}", why
    if layout.because is not None:
        yield f"{{}} {'' if layout.channels_last else 'not '}channels-last", layout.because
    if chosen.max_batch is not None:
        items = f"{chosen.max_batch} item{'s' if chosen.max_batch > 1 else ''}"
        yield f"{{}}: at most {items} at a time", f"a larger batch makes no more activations at once{once}"
    if chosen.cfg == "sequential":
        yield "{}: a step's two predictions apart", f"each alone has half the activations of both{once}"
    if chosen.cfg == "batched":
        yield "{}: a step's two predictions together", "weights are read, and brought, once for both"
    if chosen.ffn_chunk is not None:
        why = "some tokens go through at a time: the maps inside are several times as wide"
        yield f"{{}}: feed-forwards within {format_bytes(chosen.ffn_chunk)}", why
    if chosen.exported is not None:
        how, what = (", compiled", "machine code of it") if chosen.compiled else ("", "that graph")
        why = f"asked for by name: {what} works in place of the model's code"
        yield f"{{}} as exported in {chosen.exported}{how}", why


def _moves(plan: Plan, parts: Parts, *, separate: bool) -> Said:
    """What is on the device only for a while."""
    moving = [(component, chosen) for component, chosen in parts if chosen.placement != "resident"]
    able = [(component, chosen) for component, chosen in moving if separate or chosen.offload_to == "disk"]
    if not separate and (len(moving) > len(able) or plan.offload_activations or plan.vae.feature_maps == "host"):
        names = (
            ", ".join(component.name for component, chosen in moving if chosen.offload_to != "disk") or "activations"
        )
        yield f"nothing is moved ({names})", "the device computes in host memory: there is nowhere to move to"
    phases = [component for component, chosen in able if chosen.placement == "offload"]
    if phases:
        whose, who = ("its", "it") if len(phases) == 1 else ("their", "each")
        sizes = _listed([format_bytes(component.bytes) for component in phases])
        names = ", ".join(component.name for component in phases)
        yield f"{names} offload", f"{whose} {sizes} are only needed while {who} works"
    for component, chosen in able:
        if chosen.placement == "stream":
            largest = max(leaf.bytes for leaf in component.layers)
            why = f"one layer at a time needs {format_bytes(largest)} of its {format_bytes(component.bytes)}"
            yield f"{component.name} stream", why
    if plan.offload_activations and separate:
        skipping = [
            component.name for component, chosen in parts if component.has_skip_connections and chosen.exported is None
        ]
        if skipping:
            decision = f"skips of {', '.join(skipping)} moved to host memory"
            yield decision, "they wait there for the second half of a step"
        else:
            yield "no activations are moved", "no component keeps any waiting from one unit for another"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
