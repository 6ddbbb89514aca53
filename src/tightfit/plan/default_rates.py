"""Accelerator without measured rates → the same with rates of an ordinary one, so that plans' times can be compared."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.catalog.clock import host_rates
from tightfit.catalog.cuda import CONTEXT
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.stores import ORDINARY_DISK

__all__ = ["ANY_CARD", "computer_with", "with_default_rates"]

# rates of an ordinary card of 2020: operations, bytes per second; overheads in seconds
GUESSED: Mapping[str, object] = {
    "arithmetic_rates": {"float32": 5e12, "float16": 2e13, "bfloat16": 2e13},
    "memory_rate": 3e11,
    "link_rate": 1e10,
    **host_rates(),
    "streamed_overhead": 1.3e-5,
    "resident_overhead": 2.3e-6,
}
GUESSED_CPU: Mapping[str, object] = {
    "arithmetic_rates": {"float32": 1e11},
    "memory_rate": 2e10,
    "launch_overhead": 5e-6,
    "module_overhead": 1e-5,
}
ANY_CARD = Accelerator(name="any card", kind="simulated", bytes=1)  # for results independent of a card's size and rates


def with_default_rates(accelerator: Accelerator) -> Accelerator:
    """Return `accelerator` with guessed rates where it has none."""
    guessed = GUESSED_CPU if accelerator.is_cpu else GUESSED
    known = {name: rate for name in guessed if (rate := getattr(accelerator, name))}
    lacking = guessed.keys() - known.keys() - {name for name in guessed if name.endswith("_overhead")}  # may be 0
    return accelerator.model_copy(update={**guessed, **known}) if lacking else accelerator


def computer_with(*cards: Accelerator) -> Machine:
    """Return a Machine with `cards`, each less the bytes of CUDA's context, unlimited RAM and an ordinary disk."""
    left = tuple(card.model_copy(update={"bytes": max(card.bytes - CONTEXT, 1)}) for card in cards)
    return Machine(accelerators=left, ram=2**50, pinnable=2**50, cores=1, disk_rate=ORDINARY_DISK)
