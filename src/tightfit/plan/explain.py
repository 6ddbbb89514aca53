"""A plan in sentences: why each decision was made, a summary, and how two plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tightfit.plan.kernel_choice import LayoutChoice, attention_reasons
from tightfit.plan.layer_selection import resolve_streaming, weight_group_sizes
from tightfit.schema.footprint import Component, Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Plan, Reason, VaePlan
from tightfit.schema.step_cache import CacheTrace
from tightfit.units import format_bytes

__all__ = ["describe_device_weights", "differences", "explain", "summarize"]


Said = Iterator[tuple[str, str]]  # decisions and reasons; {} stands for the names of the components that share both
Parts = Sequence[tuple[Component, ComponentPlan]]
_MAPS = {
    "device": ("on the device", "nothing is copied or recomputed"),
    "host": ("in host memory", "device memory is left to the strips; each map crosses the link twice"),
    "recompute": ("as far as they fit", "they get as many bytes as the strips; the rest is recomputed"),
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
    """Return the reasons for all decisions of `plan`, as requested, about the pipeline with this `footprint`.

    `layouts` has the memory format chosen for each component. If the device has no memory of its own (it is not
    `separate`), the reasons say what is not moved; without `moves`, they leave out what is. Attention backends are
    left out without an `accelerator`.
    """
    parts = [(component, plan.components[component.name]) for component in footprint.components]
    reasons: dict[tuple[str, str], list[str]] = {}
    for pair in _pictures(plan.vae, separate=separate):
        reasons[pair] = []
    for component, chosen in parts:
        for pair in _inside(component, chosen, layouts[component.name], separate=separate):
            reasons.setdefault(pair, []).append(component.name)
    for kept in footprint.kept:
        for pair in _kept(kept, plan.components[kept.component]):
            reasons[pair] = []
    for pair in _moves(plan, parts, separate=separate) if moves else ():
        reasons[pair] = []
    attention: dict[tuple[str, str], list[str]] = {}
    for component, chosen in parts:
        for pair in attention_reasons(component, chosen, accelerator):
            attention.setdefault(pair, []).append(component.name)
    return (*_reasons(reasons), *_reasons(attention, detail=True))


def _reasons(reasons: Mapping[tuple[str, str], list[str]], *, detail: bool = False) -> Iterator[Reason]:
    """Yield a Reason for each decision and its reason, with the names of the components that share both."""
    for (decision, because), names in reasons.items():
        text = decision.replace("{}", ", ".join(names), 1) if names else decision
        yield Reason(decision=text, because=because, detail=detail)


def _pictures(vae: VaePlan, *, separate: bool) -> Said:
    """Yield how autoencoders process images, and why."""
    peak = "feature maps at full resolution are the peak of a large image"
    if vae.strips:
        yield f"strips within {format_bytes(vae.strips)}", f"{peak}; strips give the same result"
        wait, why = _MAPS["device" if vae.feature_maps == "host" and not separate else vae.feature_maps]
        yield f"feature maps between strips {wait}", why
    if vae.tile:
        where, why = (" where strips are not possible", "tiles take less than an image") if vae.strips else ("", peak)
        yield f"tiles of {vae.tile} px{where}", why
    if vae.slicing:
        yield "one item at a time", "decoding a batch together multiplies the peak and gains no time"


def _inside(component: Component, chosen: ComponentPlan, layout: LayoutChoice, *, separate: bool) -> Said:
    """Yield how a component is stored and how it computes, and why."""
    streams = chosen.placement == "stream" and chosen.moves(separate=separate)
    once = "; block by block, so that weights are loaded once" if streams else ""
    if chosen.storage != "as-loaded":
        size = 4 if component.main_dtype == "float32" else 2
        why = f"requested: most weights take one byte instead of {size}, and numbers change slightly"
        yield f"{{}} stored in {chosen.storage}", why
    if layout.because is not None:
        yield f"{{}} {'' if layout.channels_last else 'not '}channels-last", layout.because
    if chosen.max_batch is not None:
        items = f"{chosen.max_batch} item{'s' if chosen.max_batch > 1 else ''}"
        yield f"{{}}: at most {items} at a time", f"a larger batch makes no more activations at once{once}"
    if chosen.cfg == "sequential":
        yield "{}: guidance in two calls a step", f"each has half of the activations{once}"
    if chosen.cfg == "batched":
        yield "{}: guidance in one call a step", "weights are loaded and read once for both predictions"
    if chosen.ffn_chunk is not None:
        why = "a few tokens at a time: the activations inside are several times as wide"
        yield f"{{}}: feed-forwards within {format_bytes(chosen.ffn_chunk)}", why
    if chosen.gradient_checkpointing:
        yield "{}: gradient checkpointing", "each block keeps its inputs, and is run again in the backward pass"
    if chosen.exported is not None:
        how, what = (", compiled", "its machine code") if chosen.compiled else ("", "its graph")
        why = f"requested: {what} runs in place of the model's code"
        yield f"{{}} as exported in {chosen.exported}{how}", why


def _kept(kept: CacheTrace, chosen: ComponentPlan) -> Said:
    """Yield a component's step cache, and what it keeps from step to step."""
    if chosen.cache is not None:
        why = f"{kept.kept or 'nothing kept'} from step to step, which the predicted peaks include"
        yield f"{kept.component} with {chosen.cache.described}", why


def _moves(plan: Plan, parts: Parts, *, separate: bool) -> Said:
    """Yield what is not always on the device, and why."""
    moving = [(component, chosen) for component, chosen in parts if chosen.placement != "resident"]
    able = [(component, chosen) for component, chosen in moving if chosen.moves(separate=separate)]
    if not separate and (len(moving) > len(able) or plan.offload_activations or plan.vae.feature_maps == "host"):
        fixed = [component.name for component, chosen in moving if chosen.store.is_host_memory]
        names = ", ".join(fixed) or "activations"
        yield f"nothing is moved ({names})", "the device computes in host memory"
    phases = [component for component, chosen in able if chosen.placement == "offload"]
    if phases:
        whose, who = ("its", "it") if len(phases) == 1 else ("their", "each")
        sizes = _listed([format_bytes(component.bytes) for component in phases])
        names = ", ".join(component.name for component in phases)
        yield f"{names} offloaded", f"{whose} {sizes} are only needed while {who} runs"
    for component, chosen in able:
        if chosen.placement == "stream":
            largest = max(layer.bytes for layer in component.layers)
            why = f"one layer at a time needs {format_bytes(largest)} of its {format_bytes(component.bytes)}"
            yield f"{component.name} streamed", why
    if plan.offload_activations and separate:
        skipping = [
            component.name for component, chosen in parts if component.has_skip_connections and chosen.exported is None
        ]
        if skipping:
            decision = f"skip connections of {', '.join(skipping)} offloaded to host memory"
            yield decision, "only the second half of a step needs them"
        else:
            yield "no activations are offloaded", "no block keeps any for a later one"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


_LABELS = {"encoder": "encoders", "denoiser": "denoiser", "autoencoder": "VAE", "other": "others"}


def summarize(plan: Plan, footprint: Footprint) -> str:
    """Return a summary, e.g. "streams encoders 4 %, denoiser 12 %; strips": shares of weights on the device at a time.

    Components that it does not name are always on the device.
    """
    streams, offloaded = [], []
    for role, components in _by_role(footprint).items():
        if any(plan.components[c.name].placement == "stream" for c in components):
            device_bytes = sum(_device_bytes(c, plan.components[c.name]) for c in components)
            share = _share(device_bytes, sum(c.bytes for c in components))
            streams.append(f"{_LABELS[role]} {share}{_source_text(plan, components)}")
        elif any(plan.components[c.name].placement == "offload" for c in components):
            offloaded.append(_LABELS[role] + _source_text(plan, components))
    sentences = [f"streams {', '.join(streams)}"] if streams else []
    sentences += [f"{', '.join(offloaded)} offloaded"] if offloaded else []
    stored = sorted({c.storage for c in plan.components.values() if c.storage != "as-loaded"})
    return "; ".join([*sentences, *_cuts(plan.vae), *stored]) or "all on the card"


def describe_device_weights(plan: Plan, footprint: Footprint, role: str) -> str:
    """Return as text which bytes of the components of `role` are on the device while they run, and for how long."""
    components = _by_role(footprint).get(role, [])
    if not components:
        return "none"
    whole = sum(c.bytes for c in components)
    device_bytes = sum(_device_bytes(c, plan.components[c.name]) for c in components)
    placements = {plan.components[c.name].placement for c in components}
    if "stream" in placements:
        text = f"{format_bytes(device_bytes)} of {format_bytes(whole)}, streamed"
    else:
        text = f"{format_bytes(whole)}, " + ("resident" if placements == {"resident"} else "while running")
    return "; ".join([text, *(_cuts(plan.vae) if role == "autoencoder" else ())])


def _by_role(footprint: Footprint) -> dict[str, list[Component]]:
    """Return the components that run in the call by role, in order of first use."""
    used = dict.fromkeys(call.component for phase in footprint.phases for call in phase.calls)
    known = {component.name: component for component in footprint.components}
    roles: dict[str, list[Component]] = {}
    for name in used:
        roles.setdefault(known[name].role, []).append(known[name])
    return roles


def _source_text(plan: Plan, components: Sequence[Component]) -> str:
    chosen = (plan.components[c.name] for c in components)
    return next((f" from the {c.store.title}" for c in chosen if c.moves(separate=False)), "")


def _device_bytes(component: Component, chosen: ComponentPlan) -> int:
    """Return the bytes of its weights on the device while it runs, ring buffer included."""
    if chosen.placement != "stream":
        return component.bytes
    resolved = resolve_streaming(component, chosen)
    sizes = weight_group_sizes(component, resolved.granularity or "layer", resolved)
    small_bytes = component.bytes - sum(layer.bytes for layer in component.layers)
    return min(
        small_bytes + (resolved.ring_buffer or 0) + sum(sizes[name] for name in resolved.resident_layers or ()),
        component.bytes,
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if 100 * part >= whole else "< 1 %"


def _cuts(vae: VaePlan) -> Iterator[str]:
    if vae.strips is not None:
        yield "strips" + {"device": "", "host": ", maps in RAM", "recompute": ", maps recomputed"}[vae.feature_maps]
    if vae.tile is not None:
        yield f"tiles of {vae.tile} px"


def differences(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return one sentence for each decision of `after` that differs from `before`; none if both do the same."""
    return tuple(_differences(before, after))


def _differences(before: Plan, after: Plan) -> Iterator[str]:
    if before.device != after.device:
        yield f"on {after.device} instead of {before.device}"
    if before.ranks != after.ranks:
        yield "; ".join(after.ranks) or "on one rank"
    for name in dict.fromkeys((*before.components, *after.components)):
        was, becomes = (plan.components.get(name, ComponentPlan()) for plan in (before, after))
        if was.described != becomes.described:
            yield f"{name}: {becomes.described} (before: {was.described})"
        elif was != becomes:
            yield f"{name}: {_other_layers(was, becomes)}"
    if before.vae != after.vae:
        old, new = before.vae.described, after.vae.described
        yield f"autoencoder: {new} (before: {old})" if old != new else f"autoencoder: overlap {after.vae.overlap}"
    if before.offload_activations != after.offload_activations:
        yield f"activations for later blocks wait {'in host memory' if after.offload_activations else 'on the device'}"
    if before.expandable_segments != after.expandable_segments:
        yield f"the allocator's segments are {'expandable' if after.expandable_segments else 'fixed'}"


def _other_layers(old: ComponentPlan, new: ComponentPlan) -> str:
    """Return how two component plans with the same description differ."""
    if old.resident_layers != new.resident_layers:
        return "as many resident layers, but others"
    if old.weight_memory != new.weight_memory:
        return f"{format_bytes(new.weight_memory or 0)} for weights (before: {format_bytes(old.weight_memory or 0)})"
    fields = [name for name, value in new if value != getattr(old, name)]
    return f"another {' and '.join(fields)}"
