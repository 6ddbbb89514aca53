"""A device and a disk → their measured rates, within seconds.

Every rate is the median of several runs of one shape. The shapes are those of diffusion models (linear layers 3072
wide, convolutions of 256 channels, 24 heads of 128), from a few tokens or pixels to thousands: each size is four times
the work of the previous one, and the size grows while larger ones still fit into the time limit of the rate. So a fast
card is measured at full load, and half precision on a CPU without instructions for it, a hundred times slower than
single, takes no more time than the rest. It is measured nevertheless: without a rate of its own, it would count as fast
as single.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from torch.nn import functional as F

from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.measure.host_rates import LEAST_RUNS, MOST_RUNS, host_overheads
from tightfit.measure.layout_gains import layout_gains
from tightfit.schema.machine import Machine
from tightfit.units import format_bytes

__all__ = ["Progress", "Work", "device_rates", "disk_rate", "measure_rates", "rate_of"]

Progress = Callable[[str, int, int], None]  # progress callback: name of the next rate, rates done, total rates

SECONDS = 9.0  # for all devices together, without library start-up
LAYOUT_SECONDS = 3.0  # for all devices together; longer where LEAST_TURNS need it
DISK_SECONDS = 2.5
SIZES = 6  # number of sizes at most: the largest is 4⁵ times the smallest
SHORTEST = 0.005  # seconds: shorter runs are repeated and timed together
BUSY = 0.15  # share of CPU time used by other programs above which a note is added
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK, FILE = 8 * 2**20, 256 * 2**20


@dataclass(frozen=True)
class Work:
    """A repeatable benchmark workload."""

    run: Callable[[], object]
    amount: float  # FLOP or bytes of one run


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
    found: dict[str, float] = {}
    notes = []
    with torch.inference_mode():
        for name, make in makers.items():
            step(f"{device.name}: {name.replace('_', ' ')}")
            try:
                found[name] = rate_of(device, make, seconds / (len(makers) + 1))
            except RuntimeError as error:  # from torch: a dtype without a kernel, too little memory …
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                notes.append(f"{device.name}: {name.replace('_', ' ')} not measured: {reason}")
            device.release_cache()
        step(f"{device.name}: launches")
        overheads = host_overheads(device, seconds / (len(makers) + 1))
    arithmetic = {name: found.pop(name) for name in list(found) if "." in name}
    return {"arithmetic_rates": arithmetic, **overheads, **found}, notes


def rate_of(device: Device, make: Make, seconds: float) -> float:
    """Return the amount per second of the largest workload that can be run often enough in `seconds`."""
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
    return work.amount / statistics.median(runs)


def _makers(device: Device) -> dict[str, Make]:
    """The workloads to measure on `device`, by the names of an Accelerator's rates."""
    kinds = {"matmul": _matmul, "convolution": _convolution, "attention": _attention}
    makers: dict[str, Make] = {
        f"{kind}.{str(dtype).removeprefix('torch.')}": functools.partial(make, device, dtype)
        for kind, make in kinds.items()
        for dtype in DTYPES
    }
    makers["memory_rate"] = functools.partial(_memory, device)
    if device.separate:
        makers["link_rate"] = functools.partial(_link, device, False)
        makers["link_rate_out"] = functools.partial(_link, device, True)
    return makers


def _matmul(device: Device, dtype: torch.dtype, size: int) -> Work:
    rows, width = 4 * 4**size, 3072
    tokens, weight = _noise(device, dtype, rows, width), _noise(device, dtype, width, width)
    return Work(lambda: F.linear(tokens, weight), 2 * rows * width**2)


def _convolution(device: Device, dtype: torch.dtype, size: int) -> Work:
    side, channels = 8 * 2**size, 256
    picture, weight = _noise(device, dtype, 1, channels, side, side), _noise(device, dtype, channels, channels, 3, 3)
    if device.separate:  # where copies to this layout are counted beside the convolution
        picture, weight = (each.contiguous(memory_format=torch.channels_last) for each in (picture, weight))
    return Work(lambda: F.conv2d(picture, weight, padding=1), 2 * 9 * channels**2 * side**2)


def _attention(device: Device, dtype: torch.dtype, size: int) -> Work:
    heads, positions, width = 24, 128 * 2**size, 128
    query, key, value = (_noise(device, dtype, 1, heads, positions, width) for _ in range(3))
    return Work(lambda: F.scaled_dot_product_attention(query, key, value), 4 * heads * positions**2 * width)


def _memory(device: Device, size: int) -> Work:
    """Copy one tensor to another, at the largest sizes far larger than caches."""
    count = min(2**16 * 4**size, device.free_bytes() // 32)
    source, target = torch.zeros(count, device=device.torch_device), torch.zeros(count, device=device.torch_device)
    return Work(lambda: target.copy_(source), source.nbytes + target.nbytes)


def _link(device: Device, out: bool, size: int) -> Work:
    here = device.pinned(2**18 * 4**size)
    there = torch.zeros(len(here), dtype=torch.uint8, device=device.torch_device)
    source, target = (there, here) if out else (here, there)
    return Work(lambda: target.copy_(source, non_blocking=True), len(here))


def _noise(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers, repeating a short sequence; zeros would save power, and so run faster, on cards."""
    few = torch.randn(2**12, generator=torch.Generator().manual_seed(0)).to(dtype).to(device.torch_device)
    count = math.prod(shape)
    return few.repeat(-(-count // len(few)))[:count].view(shape)


def disk_rate(folder: Path, seconds: float) -> float:
    """Bytes per second that a program reads from a file in `folder`, bypassing the page cache; OSError where it cannot.

    The file has no name where the system supports that, and is unlinked at once where not: no file is left behind.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 4 * FILE:
        message = (
            f"the disk has {format_bytes(free_bytes)} of room, and a file of {format_bytes(FILE)} should not crowd it"
        )
        raise OSError(errno.ENOSPC, message)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, CHUNK) as chunk:
        chunk[:] = random.Random(0).randbytes(CHUNK)  # no zeros: file systems with compression would store nothing
        chunks = _write(file, chunk, seconds / 2)
        deadline = time.perf_counter() + seconds / 2
        runs: list[float] = []
        while not runs or (len(runs) < MOST_RUNS and time.perf_counter() < deadline):
            if len(runs) % chunks == 0:
                file.seek(0)
                _bypass_cache(file.fileno())
            start = time.perf_counter()
            read = file.readinto(chunk)
            runs.append(read / (time.perf_counter() - start))
    return statistics.median(runs)


def _write(file: BinaryIO, chunk: mmap.mmap, seconds: float) -> int:
    """Write `chunk` through to the disk until FILE bytes are written or the time is over; return the chunks written."""
    count, deadline = 0, time.perf_counter() + seconds
    while count < FILE // CHUNK and (not count or time.perf_counter() < deadline):
        file.write(chunk)
        os.fsync(file.fileno())
        count += 1
    return count


def _bypass_cache(handle: int) -> None:
    """Make reads come from the disk: bypass the page cache, or drop the file's pages from it."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "posix_fadvise"):
        raise OSError(errno.ENOTSUP, "this system has no way of reading past its page cache")
    import fcntl  # not available on every system

    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):  # in-memory and some network file systems refuse
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
