"""Bytes of layers stored in eight bits: as stored, and as widened for each use."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tightfit.schema.footprint import Component, Footprint, WeightBlock
from tightfit.schema.plan import ComponentPlan, Storage, VaePlan

__all__ = ["DEFAULT_SKIP", "allocator_bytes_by_phase", "stored_bytes", "widened_bytes"]

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes per element as loaded; stored in one
ROW = 64  # float8: bytes as loaded for each byte of scales, at least
INT8_ROW = 5  # int8: bytes of each row beside its values: its scale and its zero point


# Regular expressions for parameters that are kept as loaded: those that a model has once, at its ends (few bytes,
# much influence), and those that a LoRA adds. The modulation of every block is not among them: it is 27 % of
# FLUX.1's bytes, and its counterparts in a U-Net (`time_emb_proj`) or Qwen-Image (`img_mod`) would not match anyway.
DEFAULT_SKIP = (
    r"embed",
    r"scale_shift_table",
    r"^(\w*modulation\w*|adaln_single|norm_out|final_layer|conv_in|conv_out|proj_in|proj_out|time_\w+)\.",
    r"lora_",
)


def allocator_bytes_by_phase(footprint: Footprint, vae: VaePlan, storages: Mapping[str, Storage]) -> list[int]:
    """Return the bytes that each phase needs of an allocator for activations and widened weights."""
    widened = {
        component.name: widened_bytes(component, ComponentPlan(storage=storages[component.name]))
        for component in footprint.components
        if component.name in storages
    }
    return [
        (vae.strip_profile(phase) or phase).allocator_bytes
        + max((widened.get(call.component, 0) for call in phase.calls), default=0)
        for phase in footprint.phases
    ]


def widened_bytes(component: Component, chosen: ComponentPlan) -> int:
    """Return the most bytes of a layer's widened weights, beside the stored ones, while an operation uses them."""
    return max((_widened_bytes(layer, chosen) for layer in component.layers if _narrow(layer, chosen)), default=0)


def _widened_bytes(layer: WeightBlock, chosen: ComponentPlan) -> int:
    """Return the bytes of `layer` in float32 plus those in the compute dtype; int8 is widened to bfloat16 directly."""
    whole = 0
    for dtype, size in (layer.matrices if chosen.storage == "int8" else layer.dtypes).items():
        numbers, compute = size // WIDTHS.get(dtype, 1), chosen.compute_dtype or dtype
        if dtype in WIDTHS and not (chosen.storage == "int8" and compute == "bfloat16"):
            whole += numbers * WIDTHS["float32"]
        if dtype in WIDTHS and compute != "float32":
            whole += numbers * WIDTHS[compute]
    return whole


def _narrow(layer: WeightBlock, chosen: ComponentPlan) -> bool:
    """Whether `layer` is stored in eight bits."""
    skip = DEFAULT_SKIP if chosen.skip_patterns is None else chosen.skip_patterns
    return chosen.storage != "as-loaded" and not any(re.search(pattern, f"{layer.name}.weight") for pattern in skip)


def stored_bytes(layer: WeightBlock, chosen: ComponentPlan) -> int:
    """Return the bytes of `layer` in the storage that `chosen` gives it."""
    if not _narrow(layer, chosen):
        return layer.bytes
    if chosen.storage == "int8":
        values = sum(size // WIDTHS.get(dtype, 1) for dtype, size in layer.matrices.items())
        return layer.bytes - sum(layer.matrices.values()) + values + layer.rows * INT8_ROW
    narrowed = sum(
        size - size // WIDTHS[dtype] - size // ROW for dtype, size in layer.dtypes.items() if dtype in WIDTHS
    )
    return layer.bytes - narrowed
