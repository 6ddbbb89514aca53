"""An accelerator whose rates nobody measured → the same with those of an ordinary one, so that faster is told apart."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.catalog.cuda import CONTEXT
from tightfit.schema.machine import Accelerator, Machine

__all__ = ["ANY_CARD", "GUESSED_DISK", "computer_with", "default_disk_rate", "with_default_rates"]

# of an ordinary card of 2020
GUESSED: Mapping[str, object] = {
    "arithmetic_rates": {"float32": 5e12, "float16": 2e13, "bfloat16": 2e13},
    "memory_rate": 3e11,
    "link_rate": 1e10,
    "launch_overhead": 1e-5,
    "streamed_overhead": 1.3e-5,
    "resident_overhead": 2.3e-6,
}
GUESSED_CPU: Mapping[str, object] = {
    "arithmetic_rates": {"float32": 1e11},
    "memory_rate": 2e10,
    "launch_overhead": 5e-6,
}
GUESSED_DISK = 1e9
ANY_CARD = Accelerator(name="any card", kind="simulated", bytes=1)  # for what depends on no card's size and rates


def with_default_rates(accelerator: Accelerator) -> Accelerator:
    """`accelerator` with guessed rates where it has none."""
    guessed = GUESSED_CPU if accelerator.is_cpu else GUESSED
    known = {name: rate for name in guessed if (rate := getattr(accelerator, name))}
    lacking = guessed.keys() - known.keys() - {"launch_overhead", "streamed_overhead", "resident_overhead"}  # or none
    return accelerator.model_copy(update={**guessed, **known}) if lacking else accelerator


def default_disk_rate(machine: Machine, accelerator: Accelerator) -> float | None:
    """Bytes per second of the disk, guessed where nothing but the disk could do."""
    return machine.disk_rate or (GUESSED_DISK if accelerator.is_cpu else None)


def computer_with(*cards: Accelerator) -> Machine:
    """Whatever computer has `cards`, of which CUDA keeps its own bytes: RAM without end, an ordinary disk."""
    left = tuple(card.model_copy(update={"bytes": max(card.bytes - CONTEXT, 1)}) for card in cards)
    return Machine(accelerators=left, ram=2**50, pinnable=2**50, cores=1, disk_rate=GUESSED_DISK)
