"""How long kernels take on a device, by their arithmetic, their memory traffic and their shape. Does not import torch.

A kernel takes the longer of its arithmetic and its memory traffic (the roofline bound), and on a card whose
multiprocessors are known also what this bound leaves out, from published measurements (record 0081):

- the last tiles of a product occupy a part of the multiprocessors only, and there are few tiles to begin with;
- attention's exponentials, of which a multiprocessor computes 16 a clock, beside its products;
- tensors that fit into the second-level cache are read from there;
- a normalization reads each group of channels by one multiprocessor, however many are idle;
- pointwise kernels whose operands are laid out differently compute the address of each element by divisions;
- convolutions copy tensors to channels-last, before and after;
- each kernel starts and ends.
"""

from __future__ import annotations

from tightfit.schema.machine import Accelerator, Amounts

__all__ = ["kernel_seconds"]

EXPONENTIALS = 16  # of a multiprocessor a clock (CUDA C++ Programming Guide, arithmetic instructions)
# values that one block of a normalization reads a clock: 1.27e9 a second at 1.98 GHz, from a profile of an H200
# (record 0081)
READ_BY_BLOCK = 0.64

# index divisions of a multiprocessor a clock: 10.5 million in 32 us on an H200, by PReLU with a weight for each column
# (record 0081)
DIVISIONS = 1.2


def kernel_seconds(device: Accelerator, kind: str, dtype: str, amounts: Amounts, kernels: int = 1) -> float:
    """Return the seconds of `kernels` kernels on `device`, one after another; what has no rate takes no time.

    `amounts` is their sum; they should be of similar size.
    """
    rate = device.arithmetic_rate(kind, dtype)
    computing = (amounts.operations + amounts.padding) / rate if rate else 0.0
    if device.multiprocessors and rate:
        computing += device.tail * min(amounts.tile_operations * device.multiprocessors, amounts.operations) / rate
    reading = amounts.serial / (READ_BY_BLOCK * device.clock) if device.clock else 0.0
    indexing = 0.0
    if device.multiprocessors and device.clock:
        clocks = device.multiprocessors * device.clock
        computing += amounts.exponentials / (EXPONENTIALS * clocks)
        indexing = amounts.divisions / (DIVISIONS * clocks)
    moving = _moving_seconds(device, amounts.traffic, kernels)
    return (
        kernels * device.kernel_latency
        + max(computing, moving, reading, indexing)
        + _moving_seconds(device, amounts.copied, kernels)
    )


def _moving_seconds(device: Accelerator, size: int, kernels: int) -> float:
    """Seconds of `size` bytes of memory traffic in `kernels` equal parts, some of it to the second-level cache."""
    if not device.memory_rate:
        return 0.0
    if not device.cache_bytes or not device.cache_rate:
        return size / device.memory_rate
    cached = max(0.0, 1 - size / kernels / device.cache_bytes)
    return size * (cached / device.cache_rate + (1 - cached) / device.memory_rate)
