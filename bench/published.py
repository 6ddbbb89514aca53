"""Predicted peaks of single forward passes, beside what others have measured on cards.

The measured figures are published ones (max_memory_allocated on a CUDA card, weights included); nothing here was
fitted to them.
"""

from __future__ import annotations

import time
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
# model → the transformer's inputs (shape and dtype) and the span of measured peaks in GiB
ROWS: dict[str, tuple[str, dict[str, tuple[tuple[int, ...], torch.dtype]], tuple[float, float]]] = {
    "flux.1-dev": (
        "1024×1024",
        {
            "hidden_states": ((1, 4096, 64), BFLOAT16),
            "encoder_hidden_states": ((1, 512, 4096), BFLOAT16),
            "pooled_projections": ((1, 768), BFLOAT16),
            "timestep": ((1,), BFLOAT16),
            "img_ids": ((4096, 3), BFLOAT16),
            "txt_ids": ((512, 3), BFLOAT16),
            "guidance": ((1,), torch.float32),
        },
        (22.61, 22.64),
    ),
    "wan-2.1-14b": (
        "81 frames 480×832",
        {
            "hidden_states": ((1, 16, 21, 60, 104), BFLOAT16),
            "timestep": ((1,), torch.int64),
            "encoder_hidden_states": ((1, 512, 4096), BFLOAT16),
        },
        (30.2, 30.2),
    ),
}


def predicted(name: str, inputs: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[float, float]:
    """Peak in GiB of one forward pass of the model's transformer, and the seconds that it took to find out."""
    card = known_card("a100-80gb")
    use_cards([Card(0, card, Host())])
    started = time.perf_counter()
    transformer = build_part("transformer", known_model(name).components["transformer"])
    fitted = fit(transformer, level=0, device="pretend:0")
    with torch.no_grad():
        transformer(
            **{key: torch.zeros(shape, dtype=dtype, device="pretend") for key, (shape, dtype) in inputs.items()}
        )
    return fitted.report().trace.peak_bytes / GIB, time.perf_counter() - started


def main() -> None:
    facts: dict[str, Any] = {}
    for name, (request, inputs, (low, high)) in ROWS.items():
        peak, seconds = predicted(name, inputs)
        middle = (low + high) / 2
        facts[name] = {
            "request": request,
            "predicted_gib": round(peak, 3),
            "measured_gib": [low, high],
            "error": round(peak / middle - 1, 5),
            "seconds": round(seconds, 1),
        }
    write("predict", facts)


if __name__ == "__main__":
    main()
