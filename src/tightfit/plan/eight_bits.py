"""What layers take that are stored in eight bits: as they are stored, and as they are widened for each use."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tightfit.schema.footprint import Component, Footprint, WeightBlock
from tightfit.schema.plan import ComponentPlan, Storage, VaePlan

__all__ = ["DEFAULT_SKIP", "rooms_of", "stored_bytes", "widened_bytes"]

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number that is stored in one
ROW = 64  # bytes as loaded for each byte of scales, at least
INT8_ROW = 5  # bytes beside the values of each row: its scale and its zero point


# Names of parameters that stay as loaded: what a model has once, at its ends (few bytes, much influence), and
# what a LoRA adds. The modulation of every block is not among them: it is 27 % of FLUX.1's bytes, and a U-Net's
# counterpart (`time_emb_proj`) or Qwen-Image's (`img_mod`) would not be recognised by its name anyway.
DEFAULT_SKIP = (
    r"embed",
    r"scale_shift_table",
    r"^(\w*modulation\w*|adaln_single|norm_out|final_layer|conv_in|conv_out|proj_in|proj_out|time_\w+)\.",
    r"lora_",
)


def rooms_of(footprint: Footprint, vae: VaePlan, storages: Mapping[str, Storage]) -> list[int]:
    """Bytes that each phase wants of an allocator for activations and widened weights."""
    widened = {
        component.name: widened_bytes(component, ComponentPlan(storage=storages[component.name]))
        for component in footprint.components
        if component.name in storages
    }
    return [
        (vae.strip_profile(phase) or phase).allocator_bytes
        + max((widened.get(done.component, 0) for done in phase.calls), default=0)
        for phase in footprint.phases
    ]


def widened_bytes(component: Component, chosen: ComponentPlan) -> int:
    """The most bytes that a layer's weights take beside those stored in eight bits, while an operation uses them."""
    return max((_widened_bytes(layer, chosen) for layer in component.layers if _narrow(layer, chosen)), default=0)


def _widened_bytes(layer: WeightBlock, chosen: ComponentPlan) -> int:
    """In float32, and in the dtype that is computed in; int8 goes to bfloat16 at once."""
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
    """Bytes of `layer` in the form in which it is stored."""
    if not _narrow(layer, chosen):
        return layer.bytes
    if chosen.storage == "int8":
        values = sum(size // WIDTHS.get(dtype, 1) for dtype, size in layer.matrices.items())
        return layer.bytes - sum(layer.matrices.values()) + values + layer.rows * INT8_ROW
    narrowed = sum(
        size - size // WIDTHS[dtype] - size // ROW for dtype, size in layer.dtypes.items() if dtype in WIDTHS
    )
    return layer.bytes - narrowed
