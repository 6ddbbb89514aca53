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

__all__ = ["TILE", "kernel_seconds", "rate_from_seconds"]

TILE = 128  # rows and columns of the output that a multiprocessor computes at once, in a product
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
    computing = _operations(device, amounts) / rate + _exponential_seconds(device, amounts) if rate else 0.0
    reading = amounts.serial / (READ_BY_BLOCK * device.clock) if device.clock else 0.0
    indexing = 0.0
    if device.multiprocessors and device.clock:
        indexing = amounts.divisions / (DIVISIONS * device.multiprocessors * device.clock)
    moving = _moving_seconds(device, amounts.traffic, kernels)
    return (
        kernels * device.kernel_latency
        + max(computing, moving, reading, indexing)
        + _moving_seconds(device, amounts.copied, kernels)
    )


def rate_from_seconds(device: Accelerator, amounts: Amounts, seconds: float) -> float:
    """Return the operations per second at which `kernel_seconds` of a kernel that arithmetic bounds are `seconds`.

    Never more than twice its operations by its time.
    """
    rest = device.kernel_latency + _exponential_seconds(device, amounts)
    return _operations(device, amounts) / max(seconds - rest, seconds / 2)


def _operations(device: Accelerator, amounts: Amounts) -> float:
    """Operations, with those that idle multiprocessors could have done meanwhile."""
    tail = min(amounts.tile_operations * (device.multiprocessors or 0), amounts.operations)
    return amounts.operations + amounts.padding + device.tail * tail


def _exponential_seconds(device: Accelerator, amounts: Amounts) -> float:
    if not device.multiprocessors or not device.clock:
        return 0.0
    return amounts.exponentials / (EXPONENTIALS * device.multiprocessors * device.clock)


def _moving_seconds(device: Accelerator, size: int, kernels: int) -> float:
    """Seconds of `size` bytes of memory traffic in `kernels` equal parts, some of it to the second-level cache."""
    if not device.memory_rate:
        return 0.0
    if not device.cache_bytes or not device.cache_rate:
        return size / device.memory_rate
    cached = max(0.0, 1 - size / kernels / device.cache_bytes)
    return size * (cached / device.cache_rate + (1 - cached) / device.memory_rate)
