"""Predicted peaks of single passes, beside what others have measured on cards and published.

All are max_memory_allocated, weights included; nothing here was fitted to them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from measuring import write
from tightfit import fit
from tightfit.catalog.known import known_card, known_model
from tightfit.measure.building import build_part
from tightfit.pretend.backend import use_cards
from tightfit.pretend.card import Card
from tightfit.pretend.clock import Host

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
QWEN = "https://github.com/invoke-ai/InvokeAI/pull/9305: RTX 4090, torch 2.7.1, float16"
DECODED = {
    (512, 512): 1.274, (768, 768): 2.563, (832, 1248): 4.331, (1024, 1024): 4.369, (1088, 1920): 8.468,
    (1280, 1280): 6.693, (1536, 1024): 6.434, (1536, 1536): 9.532, (1792, 1792): 12.884, (2048, 2048): 16.754,
}  # fmt: skip
ENCODED = {
    (512, 512): 0.900, (768, 768): 1.724, (832, 1248): 2.854, (1024, 1024): 2.879, (1088, 1920): 5.498,
    (1280, 1280): 4.364, (1536, 1024): 4.199, (1536, 1536): 6.179,
}  # fmt: skip


def qwen(method: str, size: tuple[int, int], measured: float) -> Row:
    height, width = size
    shape = (1, 16, 1, height // 8, width // 8) if method == "decode" else (1, 3, 1, height, width)
    inputs = {"z" if method == "decode" else "x": (shape, torch.float16)}
    span = (measured, measured)
    return Row("qwen-image", "vae", f"{method} {width}×{height}", inputs, span, QWEN, method, torch.float16, "rtx4090")


GIVEN = "given with the project's design, where it came from is not said"
ROWS = [
    Row("flux.1-dev", "transformer", "1024×1024", FLUX, (22.61, 22.64), GIVEN),
    Row("wan-2.1-14b", "transformer", "81 frames 480×832", WAN, (30.2, 30.2), GIVEN),
    *(qwen("decode", size, peak) for size, peak in DECODED.items()),
    *(qwen("encode", size, peak) for size, peak in ENCODED.items()),
]


def predicted(row: Row) -> tuple[float, float]:
    """Peak in GiB, and the seconds that it took to find out."""
    use_cards([Card(0, known_card(row.card), Host())])
    started = time.perf_counter()
    part = build_part(row.part, known_model(row.model).components[row.part], row.dtype)
    fitted = fit(part, level=0, device="pretend:0")
    with torch.no_grad():
        call = part if row.method == "forward" else getattr(part, row.method)
        call(**{key: torch.zeros(shape, dtype=dtype, device="pretend") for key, (shape, dtype) in row.inputs.items()})
    return fitted.report().trace.peak_bytes / GIB, time.perf_counter() - started


def main() -> None:
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        peak, seconds = predicted(row)
        low, high = row.measured
        rows.append(
            {
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
        )
    write("published", {"rows": rows})


if __name__ == "__main__":
    main()
