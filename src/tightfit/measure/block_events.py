"""What a block does on a simulated card, as events that can be replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tightfit.simulator.allocator import AllocatorEvent
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["Allocated", "BlockEvent", "Freed", "Ran", "block_events"]


class Allocated(NamedTuple):
    """An allocation of `size` bytes; a block's allocations are numbered in this order."""

    size: int


class Freed(NamedTuple):
    number: int


class Ran(NamedTuple):
    work: KernelCost
    layer: str  # relative path


BlockEvent = Allocated | Freed | Ran


def block_events(
    steps: Sequence[AllocatorEvent], ran: Sequence[tuple[int, KernelCost, str | None]]
) -> tuple[tuple[BlockEvent, ...], dict[int, int]] | None:
    """Return a block's events, from its allocator `steps` and the kernels that `ran`, with the steps before each.

    Also return the memory it did not free, as block number → allocation number. None if it cannot be replayed.
    """
    events: list[BlockEvent] = []
    there: dict[int, int] = {}
    allocated, kernels = 0, deque(ran)
    for position, step in enumerate((*steps, None)):
        while kernels and (step is None or kernels[0][0] <= position):
            _, work, layer = kernels.popleft()
            if layer is None:  # a layer outside the block, which other blocks do not have
                return None
            events.append(Ran(work, layer))
        if step is None:
            break
        if step.what == "malloc":
            there[step.block] = allocated
            allocated += 1
            events.append(Allocated(step.size))
        elif step.what == "free" and step.block in there:
            events.append(Freed(there.pop(step.block)))
        else:
            return None
    return tuple(events), there
