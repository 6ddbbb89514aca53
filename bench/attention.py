"""Chunked attention beside torch's: plain products (math) and what torch chooses by itself, in float32 on this CPU.

Times are medians of turns (A B C A B C …), as shares of math's; bytes are the most above inputs, so with the output;
errors are against float64, root of the mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import counting, side_by_side, write
from tightfit.apply.activations.chunked_attention import chunked_attention
from tightfit.plan.kernel_choice import score_chunk_bytes

HEADS, WIDTH = 2, 64
LENGTHS = (1024, 2048, 4096, 8192)
BLOCKS = (2, 4, 8, 16, 32, 64)  # MiB
MIB = 2**20
ROUNDS = 5

Attend = Callable[[], torch.Tensor]


def inputs(tokens: int, masked: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Queries, keys and values as networks have them, heads inside positions; a mask to add, for all heads."""
    torch.manual_seed(0)
    parts = [torch.randn(1, tokens, HEADS, WIDTH).transpose(1, 2) for _ in range(3)]
    return parts, torch.randn(1, 1, tokens, tokens) if masked else None


def math(parts: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*parts, attn_mask=mask)


def rivals(parts: list[torch.Tensor], mask: torch.Tensor | None) -> dict[str, Attend]:
    return {
        "math": lambda: math(parts, mask),
        "torch's choice": lambda: F.scaled_dot_product_attention(*parts, attn_mask=mask),
        "chunked": lambda: chunked_attention(*parts, mask, chunk_bytes=score_chunk_bytes("cpu")),
    }


def compare(tokens: int, masked: bool) -> dict[str, Any]:
    parts, mask = inputs(tokens, masked)
    calls = rivals(parts, mask)
    times = side_by_side(calls, ROUNDS)
    exact = F.scaled_dot_product_attention(
        *(part.double() for part in parts), attn_mask=None if mask is None else mask.double()
    )
    facts: dict[str, Any] = {}
    for name, call in calls.items():
        with counting() as peak:
            result = call()
        facts[name] = {
            "seconds": round(times[name], 4),
            "time_ratio": round(times[name] / times["math"], 3),
            "peak_bytes": peak.most,
            "error": float((result.double() - exact).square().mean().sqrt()),
        }
    return {"tokens": tokens, "mask": masked, **facts}


def blocks(tokens: int) -> dict[str, float]:
    """Time by size of block, as a share of math's."""
    parts, _ = inputs(tokens, masked=False)

    def chunked(size: int) -> Attend:
        return lambda: chunked_attention(*parts, chunk_bytes=size * MIB)

    times = side_by_side(
        {"math": lambda: math(parts, None), **{f"{size} MiB": chunked(size) for size in BLOCKS}}, ROUNDS
    )
    return {name: round(seconds / times["math"], 3) for name, seconds in times.items() if name != "math"}


def main() -> None:
    facts: dict[str, Any] = {
        "heads": HEADS,
        "width": WIDTH,
        "rounds": ROUNDS,
        "score_chunk_bytes": score_chunk_bytes("cpu"),
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        facts[f"threads {threads}"] = {
            "blocks at 4096": blocks(4096),
            "calls": [compare(tokens, masked) for masked in (False, True) for tokens in LENGTHS],
        }
    write("attention-cpu", facts)


if __name__ == "__main__":
    Path(__file__).parent.joinpath("results").mkdir(exist_ok=True)
    main()
