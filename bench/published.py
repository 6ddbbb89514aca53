"""Predicted peaks of single passes and of whole calls, beside what others have measured on cards and published.

Allocated: max_memory_allocated, weights included. Reserved: what max_memory_reserved grew by. Nothing here was fitted
to them. The autoencoder of Qwen-Image was measured with a diffusers that did not yet normalise in float32; that line
is put back here, or the two would not be the same work. Of whole calls the pages were not found again: neither cards
nor versions of libraries are known but where a row says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm
from torch.nn import functional as F

from measuring import write
from tightfit import fit
from tightfit.catalog.known import known_card, known_model
from tightfit.measure.build_models import build_part
from tightfit.run.simulate import simulate_call
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors
from tightfit.simulator.timeline import Host

GIB = 2**30
BFLOAT16 = torch.bfloat16
Inputs = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Row:
    """One pass of a known model's component, and the span of measured peaks in GiB."""

    model: str
    part: str
    request: str
    inputs: Inputs  # shape and dtype of each
    measured: tuple[float, float]
    source: str
    reserved: float | None = None  # GiB
    method: str = "forward"
    dtype: torch.dtype = BFLOAT16
    card: str = "a100-80gb"


FLUX: Inputs = {
    "hidden_states": ((1, 4096, 64), BFLOAT16),
    "encoder_hidden_states": ((1, 512, 4096), BFLOAT16),
    "pooled_projections": ((1, 768), BFLOAT16),
    "timestep": ((1,), BFLOAT16),
    "img_ids": ((4096, 3), BFLOAT16),
    "txt_ids": ((512, 3), BFLOAT16),
    "guidance": ((1,), torch.float32),
}
WAN: Inputs = {
    "hidden_states": ((1, 16, 21, 60, 104), BFLOAT16),
    "timestep": ((1,), torch.int64),
    "encoder_hidden_states": ((1, 512, 4096), BFLOAT16),
}
LTX: Inputs = {
    "hidden_states": ((1, 7392, 128), BFLOAT16),
    "encoder_hidden_states": ((1, 256, 4096), BFLOAT16),
    "encoder_attention_mask": ((1, 256), BFLOAT16),
    "timestep": ((1,), BFLOAT16),
    "video_coords": ((1, 3, 7392), BFLOAT16),
}
SDXL: Inputs = {
    "sample": ((1, 4, 128, 128), BFLOAT16),
    "timestep": ((1,), BFLOAT16),
    "encoder_hidden_states": ((1, 77, 2048), BFLOAT16),
    "text_embeds": ((1, 1280), BFLOAT16),
    "time_ids": ((1, 6), BFLOAT16),
}
DIFFUSERS = "https://huggingface.co/datasets/diffusers/benchmarks: several torch versions, 2025 and 2026"
QWEN = "https://github.com/invoke-ai/InvokeAI/pull/9305: RTX 4090, torch 2.7.1, float16"
# height, width → allocated, reserved
DECODED = {
    (512, 512): (1.274, 1.311), (768, 768): (2.563, 2.992), (832, 1248): (4.331, 5.211), (1024, 1024): (4.369, 5.254),
    (1088, 1920): (8.468, 10.408), (1280, 1280): (6.693, 8.188), (1536, 1024): (6.434, 7.857),
    (1536, 1536): (9.532, 11.736), (1792, 1792): (12.884, 15.949), (2048, 2048): (16.754, 20.799),
}  # fmt: skip
ENCODED = {
    (512, 512): (0.900, 0.711), (768, 768): (1.724, 1.594), (832, 1248): (2.854, 2.824), (1024, 1024): (2.879, 2.848),
    (1088, 1920): (5.498, 5.672), (1280, 1280): (4.364, 4.459), (1536, 1024): (4.199, 4.281),
    (1536, 1536): (6.179, 6.396),
}  # fmt: skip


def qwen(method: str, size: tuple[int, int], measured: tuple[float, float]) -> Row:
    height, width = size
    shape = (1, 16, 1, height // 8, width // 8) if method == "decode" else (1, 3, 1, height, width)
    inputs = {"z" if method == "decode" else "x": (shape, torch.float16)}
    request, (peak, reserved) = f"{method} {width}×{height}", measured
    return Row("qwen-image", "vae", request, inputs, (peak, peak), QWEN, reserved, method, torch.float16, "rtx4090")


ROWS = [
    Row("flux.1-dev", "transformer", "1024×1024", FLUX, (22.61, 22.64), DIFFUSERS, card="l40"),
    Row("wan-2.1-14b", "transformer", "81 frames 480×832", WAN, (30.2, 30.2), DIFFUSERS, card="l40"),
    Row("ltx-video-13b", "transformer", "161 frames 512×704", LTX, (25.21, 25.22), DIFFUSERS, card="l40"),
    Row("sdxl", "unet", "1024×1024", SDXL, (5.05, 5.05), DIFFUSERS, card="l40"),
    *(qwen("decode", size, peak) for size, peak in DECODED.items()),
    *(qwen("encode", size, peak) for size, peak in ENCODED.items()),
]


@dataclass(frozen=True)
class Call:
    """A whole call of a known model, all of it on the card, and the span of measured peaks in GiB."""

    model: str
    request: Request | None  # None: as usual
    measured: tuple[float, float]
    year: int
    card: str = "a100-80gb"
    remark: str = ""


UNKNOWN = "source not found again"
SQUARE = Request(height=1024, width=1024, steps=2)
CALLS = [
    Call("flux.1-dev", SQUARE, (33.849, 33.849), 2024, card="h100", remark="measured on an H20"),
    Call("sd3.5-large", SQUARE, (28.525, 28.525), 2024),
    Call("sd3-medium", SQUARE, (18.76, 18.80), 2024),
    Call("pixart-sigma", SQUARE, (14.45, 14.45), 2024, remark="which PixArt is not known"),
    Call("sd-1.5", Request(height=512, width=512, steps=2), (2.62, 2.62), 2024, remark="perhaps with a safety checker"),
    Call("sdxl", SQUARE, (10.47, 10.47), 2024, remark="the autoencoder decodes in float32 here"),
    Call("cogvideox-5b", None, (31.746, 31.746), 2024, remark="size and frames not known"),
    Call("cogvideox-2b", None, (24.511, 24.511), 2024, remark="size and frames not known; T5's wo may be in float32"),
]


def compared(call: Call) -> dict[str, Any]:
    request = call.request or known_model(call.model).request.model_copy(update={"steps": 2})
    told = simulate_call(call.model, known_card(call.card), {"level": 0}, request)
    peak, (low, high) = told.trace.peak_bytes / GIB, call.measured
    highest = max(told.trace.phases, key=lambda phase: phase.peak_bytes)
    return {
        "model": call.model,
        "request": request.described,
        "card": call.card,
        "predicted_gib": round(peak, 3),
        "phase": highest.name,
        "measured_gib": [low, high],
        "error": round(peak / ((low + high) / 2) - 1, 4),
        "year": call.year,
        "source": UNKNOWN,
        "remark": call.remark,
    }


def predicted(row: Row) -> tuple[float, float, float]:
    """Allocated and reserved in GiB, and the seconds that it took to find out."""
    card = SimulatedCard(0, known_card(row.card), Host())
    use_cards([card])
    started = time.perf_counter()
    part = build_part(row.part, known_model(row.model).components[row.part], row.dtype)
    fitted = fit(part, level=0, device="simulated:0")
    free_dead_tensors()
    before = card.allocator.reserved.now
    call = part if row.method == "forward" else getattr(part, row.method)
    given: dict[str, Any] = {
        key: torch.zeros(shape, dtype=dtype, device="privateuseone") for key, (shape, dtype) in row.inputs.items()
    }
    if row.part == "unet":
        given["added_cond_kwargs"] = {key: given.pop(key) for key in ("text_embeds", "time_ids")}
    with torch.no_grad():
        call(**given)
    peak, reserved = fitted.report().trace.peak_bytes, card.allocator.reserved.peak - before
    return peak / GIB, reserved / GIB, time.perf_counter() - started


def normalised_as_it_was(self: Any, x: torch.Tensor) -> torch.Tensor:
    normalised: torch.Tensor = F.normalize(x, dim=1 if self.channel_first else -1)
    return normalised * self.scale * self.gamma + self.bias


def main() -> None:
    QwenImageRMS_norm.forward = normalised_as_it_was
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        peak, reserved, seconds = predicted(row)
        low, high = row.measured
        found = {
            "model": row.model,
            "method": row.method,
            "pass": f"{row.part} {row.request}",
            "dtype": str(row.dtype).removeprefix("torch."),
            "predicted_gib": round(peak, 3),
            "measured_gib": [low, high],
            "error": round(peak / ((low + high) / 2) - 1, 5),
            "seconds": round(seconds, 1),
            "source": row.source,
        }
        if row.reserved is not None:
            found |= {"predicted_reserved_gib": round(reserved, 3), "measured_reserved_gib": row.reserved}
            found["reserved_error"] = round(reserved / row.reserved - 1, 4)
        rows.append(found)
    write("published", {"rows": rows, "calls": [compared(call) for call in CALLS]})


if __name__ == "__main__":
    main()
