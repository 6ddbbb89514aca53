"""Constants of CUDA and its libraries on any card, for the simulator and the planner."""

from __future__ import annotations

from importlib.metadata import version

__all__ = [
    "CONTEXT",
    "KEEPS_WORKSPACE",
    "LT_SHARES_WORKSPACE",
    "LT_WORKSPACE",
    "PAGEABLE",
    "PAGE_TAIL",
    "product_workspaces",
    "workspace_bytes",
]

CONTEXT = 512 * 2**20  # bytes of a card used by the CUDA context and the driver (an assumption)
# bytes: torch compares a request, rounded up to 2 MiB, with its limit, and then maps pages of 20 MiB for it if
# segments are expandable (alloc_block in c10/cuda/CUDACachingAllocator.cpp); this much of the last may exceed the limit
PAGE_TAIL = 18 * 2**20
PAGEABLE = 0.5  # of the link's rate: the driver copies through a pinned buffer of its own (an assumption)
# whether cuBLAS keeps its workspace; torch 2.15 allocates one for each matmul (pytorch/pytorch pull request 194311;
# TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps it there too, which plans do not consider)
KEEPS_WORKSPACE = version("torch") < "2.15"
LT_WORKSPACE = 2**20  # bytes of cuBLASLt's workspace, where it has its own
LT_SHARES_WORKSPACE = "2.12" <= version("torch") < "2.15"  # whether cuBLASLt uses the workspace of cuBLAS


def workspace_bytes(compute_capability: str | None) -> int:
    """Return the bytes of a cuBLAS workspace: one for each stream if it is kept, else one for each matmul.

    torch's default is :4096:2:16:8, and :4096:8 on compute capability 9, 10 and 12.
    """
    major = (compute_capability or "").partition(".")[0]
    return 32 * 2**20 if major in ("9", "10", "12") else 8_519_680


def product_workspaces(compute_capability: str | None, *, through_lt: bool) -> tuple[int, ...]:
    """Return the bytes of each workspace that a matmul by cuBLAS (or cuBLASLt) allocates if it does not exist yet."""
    whole = workspace_bytes(compute_capability)
    if not through_lt or LT_SHARES_WORKSPACE:
        return (whole,)
    return (whole, LT_WORKSPACE) if KEEPS_WORKSPACE else (LT_WORKSPACE,)
