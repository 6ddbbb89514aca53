"""What CUDA and its libraries do on any card, for whoever plays one and whoever plans for one."""

from __future__ import annotations

__all__ = ["CONTEXT", "OVERSHOOT", "PAGEABLE", "workspace_bytes"]

CONTEXT = 512 * 2**20  # bytes of a card that its context and the driver keep (an assumption)
# bytes: torch compares a request, rounded up to 2 MiB, with its limit, and then maps pages of 20 MiB for it where
# segments are expandable (alloc_block in c10/cuda/CUDACachingAllocator.cpp)
OVERSHOOT = 18 * 2**20
PAGEABLE = 0.5  # of the link's rate: the driver copies through a pinned buffer of its own (an assumption)


def workspace_bytes(compute_capability: str | None) -> int:
    """Bytes that cuBLAS keeps for each stream it is used on.

    torch's default is :4096:2:16:8, and :4096:8 on compute capability 9, 10 and 12.
    """
    major = (compute_capability or "").partition(".")[0]
    return 32 * 2**20 if major in ("9", "10", "12") else 8_519_680
