"""Two plans → what differs between them, in words."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.decisions import ComponentPlan
from tightfit.records import Plan
from tightfit.units import format_bytes

__all__ = ["differences"]


def differences(before: Plan, after: Plan) -> tuple[str, ...]:
    """What `after` decides otherwise than `before`, a sentence each; nothing where both do the same."""
    return tuple(_differences(before, after))


def _differences(before: Plan, after: Plan) -> Iterator[str]:
    if before.device != after.device:
        yield f"on {after.device} instead of {before.device}"
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
        yield f"what waits for later units waits {'in host memory' if after.offload_activations else 'on the device'}"
    if before.expandable_segments != after.expandable_segments:
        yield "the allocator holds " + ("less idle memory" if after.expandable_segments else "what it likes")


def _other_layers(old: ComponentPlan, new: ComponentPlan) -> str:
    """How two that are described alike differ."""
    if old.resident_layers != new.resident_layers:
        return "as many layers stay, but others"
    if old.weight_memory != new.weight_memory:
        return f"{format_bytes(new.weight_memory or 0)} for weights (before: {format_bytes(old.weight_memory or 0)})"
    fields = [name for name, value in new if value != getattr(old, name)]
    return f"another {' and '.join(fields)}"
