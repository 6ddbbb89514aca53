"""What of a card and of its driver is taken, locked or switched on: to be as before after `undo()`."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from cuda_stub import driver

__all__ = ["CardState", "assert_nothing_left", "card_state", "fill_cache"]

SMALL = 2 * 2**20  # bytes of torch's segments of small tensors


@dataclass(frozen=True)
class CardState:
    allocated: tuple[int, ...]  # bytes of tensors, by card
    reserved: tuple[int, ...]  # bytes that the allocator could not give back
    fractions: tuple[float, ...]  # of a card that the process may take
    growing: bool  # expandable segments
    locked: int  # bytes of host memory; the stub tells
    registered: int  # ranges of host memory


def card_state() -> CardState:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if empty := getattr(torch._C, "_host_emptyCache", None):
        empty()
    cards = range(torch.cuda.device_count())
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda card: 1.0)
    return CardState(
        allocated=tuple(torch.cuda.memory_allocated(card) for card in cards),
        reserved=tuple(torch.cuda.memory_reserved(card) for card in cards),
        fractions=tuple(fraction(card) for card in cards),
        growing=bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]),
        locked=driver.count("locked_now"),
        registered=driver.count("registered"),
    )


def assert_nothing_left(before: CardState) -> None:
    """What tests before this one have left may have been thrown away meanwhile."""
    after = card_state()
    assert after.growing == before.growing, "expandable segments stay switched on"
    assert after.fractions == before.fractions, "the allocator keeps a limit"
    assert after.allocated <= before.allocated
    # the scheduler's own tensors, made anew by each call, may lie in one segment of small tensors more
    assert all(after.reserved[card] <= before.reserved[card] + SMALL for card in range(len(after.reserved)))
    assert after.registered <= before.registered, "host memory stays registered"
    assert after.locked <= before.locked, "host memory stays page-locked"


def fill_cache() -> list[torch.Tensor]:
    """Tensors in all memory that the allocator has from the driver."""
    torch.cuda.empty_cache()
    reserved, filling = torch.cuda.memory_reserved(), []
    for size in (SMALL, 512):  # from segments for large tensors, and for small ones
        while torch.cuda.memory_reserved() == reserved:
            filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        filling.pop()
        torch.cuda.empty_cache()
    return filling
