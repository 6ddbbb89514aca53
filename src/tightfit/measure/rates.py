"""Devices and a disk → their measured rates, within seconds.

Every rate is the median of several runs of one shape. The shapes are those of diffusion models (linear layers 3072
wide, convolutions of 256 channels, 24 heads of 128), from a few tokens or pixels to thousands: each size is four times
the work of the previous one, and the size grows while larger ones still fit into the time limit of the rate. So a fast
card is measured at full load, and half precision on a CPU without instructions for it, a hundred times slower than
single, takes no more time than the rest. It is measured nevertheless: without a rate of its own, it would count as fast
as single.

An arithmetic rate is that by which the clock's formula gives the measured time. What else the formula knows of a card
(`kernel_terms`) is not measured: its multiprocessors, their clock and cache are as torch says, the rest as published.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.catalog.clock import kernel_terms, sustained_share
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.measure.disk_rate import disk_rate
from tightfit.measure.host_rates import LEAST_RUNS, MOST_RUNS, host_overheads
from tightfit.measure.layout_gains import layout_gains
from tightfit.schema.kernel_time import TILE, rate_from_seconds
from tightfit.schema.machine import Accelerator, Amounts, Machine

__all__ = ["Progress", "Work", "device_rates", "measure_rates", "timed"]

Progress = Callable[[str, int, int], None]  # progress callback: name of the next rate, rates done, total rates

SECONDS = 9.0  # for all devices together, without library start-up
LAYOUT_SECONDS = 3.0  # for all devices together; longer where LEAST_TURNS need it
DISK_SECONDS = 2.5
SIZES = 6  # number of sizes at most: the largest is 4⁵ times the smallest
SHORTEST = 0.005  # seconds: shorter runs are repeated and timed together
BUSY = 0.15  # share of CPU time used by other programs above which a note is added
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)


@dataclass(frozen=True)
class Work:
    """A repeatable benchmark workload."""

    run: Callable[[], object]
    amounts: Amounts  # of one run

    def rate(self, seconds: float, card: Accelerator) -> float:
        """Operations, or bytes of work without operations, per second on `card` if a run takes `seconds`."""
        if self.amounts.operations:
            return rate_from_seconds(card, self.amounts, seconds)
        return self.amounts.traffic / max(seconds - card.kernel_latency, seconds / 2)


Make = Callable[[int], Work]  # takes a size: 0, 1, 2 …, each four times the work of the previous one


def measure_rates(machine: Machine, folder: Path, progress: Progress = lambda name, done, total: None) -> Machine:
    """Return `machine` with the rates of its devices and of the disk of `folder`; with a note for each one missing."""
    devices = [choose_device(accelerator.name) for accelerator in machine.accelerators]
    total, done = sum(len(_makers(device)) + 2 for device in devices) + 1, itertools.count()
    accelerators, notes, others = [], list(machine.notes), _others()

    def step(name: str) -> None:
        progress(name, next(done), total)

    for device, accelerator in zip(devices, machine.accelerators, strict=True):
        rates, missing = device_rates(device, SECONDS / len(devices), step)
        step(f"{device.name}: channels last")
        gains, unknown = layout_gains(device, LAYOUT_SECONDS / len(devices))
        accelerators.append(type(accelerator)(**dict(accelerator) | rates | {"channels_last_gains": gains}))
        notes += missing + unknown
    step("disk")
    disk = None
    try:
        disk = disk_rate(folder, DISK_SECONDS)
    except OSError as error:
        notes.append(f"disk: not measured: {error.strerror or error}")
    step("done")
    if (share := others()) > BUSY:
        notes.append(f"other programs took {share:.0%} of the processors meanwhile, which lowers rates")
    return Machine(**dict(machine) | {"accelerators": accelerators, "disk_rate": disk, "notes": notes})


def _others() -> Callable[[], float]:
    """Return a function that reports the share of all CPU time that other programs have used since this call."""

    def worked() -> float:
        times = psutil.cpu_times()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(times, kind, 0.0) for kind in kinds) - time.process_time()

    start, before = time.perf_counter(), worked()
    return lambda: (worked() - before) / ((time.perf_counter() - start) * (psutil.cpu_count() or 1))


def device_rates(device: Device, seconds: float, step: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
    """Return the rates of `device` as fields of an Accelerator, and notes on the rates that could not be measured."""
    makers = _makers(device)
    card = Accelerator(name=device.name, kind=device.kind, bytes=1, **_terms(device))
    found: dict[str, float] = {}
    notes: list[str] = []
    share = seconds / (len(makers) + 1)
    with torch.inference_mode():
        for name, make in makers.items():
            with _measuring(device, name.replace("_", " "), step, notes):
                work, taken = timed(device, make, share)
                found[name] = work.rate(taken, card)
        with _measuring(device, "launches", step, notes):
            found |= host_overheads(device, share)
    arithmetic = {name: found.pop(name) for name in list(found) if "." in name}
    return {"arithmetic_rates": arithmetic, **_terms(device, found.get("memory_rate")), **found}, notes


@contextlib.contextmanager
def _measuring(device: Device, what: str, step: Callable[[str], None], notes: list[str]) -> Iterator[None]:
    """Tell the step, and note an error of torch's: a dtype without a kernel, too little memory …"""
    step(f"{device.name}: {what}")
    try:
        yield
    except RuntimeError as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        notes.append(f"{device.name}: {what} not measured: {reason}")
    device.release_cache()


def _terms(device: Device, memory_rate: float | None = None) -> dict[str, Any]:
    """The clock's terms for `device` that are not measured here, as fields of an Accelerator."""
    if (known := device.multiprocessors()) is None:
        return {}
    share = sustained_share(device.compute_capability() or "", device.product_name() or "")
    return kernel_terms(known.number, share * known.clock, known.cache_bytes, memory_rate)


def timed(device: Device, make: Make, seconds: float) -> tuple[Work, float]:
    """Return the largest workload that can be run often enough in `seconds`, and the seconds of one run."""
    make(0).run()  # the first call initializes libraries, which is not part of any rate
    device.synchronize()
    deadline = time.perf_counter() + seconds
    for size in range(SIZES):
        work = make(size)
        work.run()
        begun = time.perf_counter()
        taken = device.seconds(work.run)
        waited = time.perf_counter() - begun  # longer than the device's time, where its clock is simulated
        # the next size takes four times as long, and is run six times
        if time.perf_counter() + 24 * max(taken, waited) > deadline:
            break
    times = math.ceil(SHORTEST / max(taken, 1e-6))
    while times > 1 and time.perf_counter() + LEAST_RUNS * times * waited > deadline:
        times //= 2

    def run() -> None:
        for _ in range(times):
            work.run()

    runs: list[float] = []
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() < deadline):
        runs.append(device.seconds(run) / times)
    return work, statistics.median(runs)


def _makers(device: Device) -> dict[str, Make]:
    """The workloads to measure on `device`, by the names of an Accelerator's rates."""
    kinds: dict[str, Callable[[Device, torch.dtype, int], Work]] = {
        "matmul": _matmul,
        "convolution": _convolution,
        "attention": _attention,
    }
    makers: dict[str, Make] = {
        f"{kind}.{_name(dtype)}": functools.partial(make, device, dtype)
        for kind, make in kinds.items()
        for dtype in DTYPES
    }
    if device.compute_capability():  # the kernel of CUDA cards before 9.0 where a mask is given
        makers |= {
            f"efficient-attention.{_name(dtype)}": functools.partial(_attention, device, dtype, masked=True)
            for dtype in HALVES
        }
    makers["memory_rate"] = functools.partial(_memory, device)
    if device.separate:
        makers["link_rate"] = functools.partial(_link, device, False)
        makers["link_rate_out"] = functools.partial(_link, device, True)
    return makers


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product(operations: int, *parts: torch.Tensor, outputs: int) -> Amounts:
    """Amounts of a matrix product or convolution of `parts` with so many `outputs`."""
    traffic = sum(part.nbytes for part in parts) + outputs * parts[0].element_size()
    return Amounts(operations, traffic, tile_operations=TILE * TILE * operations // outputs)


def _matmul(device: Device, dtype: torch.dtype, size: int) -> Work:
    rows, width = 4 * 4**size, 3072
    tokens, weight = _noise(device, dtype, rows, width), _noise(device, dtype, width, width)
    amounts = _product(2 * rows * width**2, tokens, weight, outputs=rows * width)
    return Work(lambda: F.linear(tokens, weight), amounts)


def _convolution(device: Device, dtype: torch.dtype, size: int) -> Work:
    side, channels = 8 * 2**size, 256
    picture, weight = _noise(device, dtype, 1, channels, side, side), _noise(device, dtype, channels, channels, 3, 3)
    if device.separate:  # where copies to this layout are counted beside the convolution
        picture, weight = (each.contiguous(memory_format=torch.channels_last) for each in (picture, weight))
    amounts = _product(2 * 9 * channels**2 * side**2, picture, weight, outputs=channels * side**2)
    return Work(lambda: F.conv2d(picture, weight, padding=1), amounts)


def _attention(device: Device, dtype: torch.dtype, size: int, *, masked: bool = False) -> Work:
    heads, positions, width = 24, 128 * 2**size, 128
    query, key, value = (_noise(device, dtype, 1, heads, positions, width) for _ in range(3))
    mask = torch.ones(1, 1, 1, positions, dtype=torch.bool, device=device.torch_device) if masked else None
    scores = heads * positions**2
    amounts = Amounts(4 * scores * width, 4 * query.nbytes, exponentials=scores)

    def run() -> None:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if masked else contextlib.nullcontext():
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return Work(run, amounts)


def _memory(device: Device, size: int) -> Work:
    """Copy one tensor to another, at the largest sizes far larger than caches."""
    count = min(2**16 * 4**size, device.free_bytes() // 32)
    source, target = torch.zeros(count, device=device.torch_device), torch.zeros(count, device=device.torch_device)
    return Work(lambda: target.copy_(source), Amounts(0, source.nbytes + target.nbytes))


def _link(device: Device, out: bool, size: int) -> Work:
    here = device.pinned(2**18 * 4**size)
    there = torch.zeros(len(here), dtype=torch.uint8, device=device.torch_device)
    source, target = (there, here) if out else (here, there)
    return Work(lambda: target.copy_(source, non_blocking=True), Amounts(0, len(here)))


def _noise(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers, repeating a short sequence; zeros would save power, and so run faster, on cards."""
    few = torch.randn(2**12, generator=torch.Generator().manual_seed(0)).to(dtype).to(device.torch_device)
    count = math.prod(shape)
    return few.repeat(-(-count // len(few)))[:count].view(shape)
