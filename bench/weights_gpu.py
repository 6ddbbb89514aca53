"""Denoisers larger than what a card may use: tightfit's streaming from RAM beside what others do.

FLUX.1 at 1024² and Wan 14B at 81 frames of 480×832, in their full size with random bfloat16 weights in RAM (with fewer
blocks where RAM is short), work passes while torch's allocator may reserve no more than a budget. The weights are made
once; every contender runs in a process forked from there, one after another, round after round, so that each finds the
accelerator untouched. Where a contender takes a size, it gets the bytes that the budget leaves for weights: the budget,
less what a pass reserves beside weights where all of them are on the device, less a margin.

The bound: a pass takes as long as with everything on the device, or as long as page-locked memory takes to bring the
bytes that cannot stay, whichever is longer.

    python bench/weights_gpu.py                                  the whole comparison; about 20 minutes a model
    python bench/weights_gpu.py --models flux.1-dev --budgets 12GB --only tightfit,group-leaves
    python bench/weights_gpu.py --dry                            tiny models on the CPU, to try out this file
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or whoever asks for cards while being imported opens one, here
import torch
from torch import nn

from tightfit.units import format_bytes, parse_bytes
from weights import Row, summary, write
from weights_gpu_contenders import CONTENDERS, Case, Terms, make_case, on_device

FAILED = "failed"
VALUES = ("first_seconds", "seconds", "host_seconds", "peak_reserved", "pinned_bytes", "to_bound")
Contender = Callable[[nn.Module, Terms], Any]


def forked(act: Callable[[], Row], limit: float) -> Row:
    """What `act` returns, from a process of its own: the weights are shared with it, the accelerator is not."""
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_send, args=(act, there))
    process.start()
    there.close()
    row: Row = {FAILED: f"stopped after {limit:.0f} s"}
    try:
        if here.poll(limit):
            row = here.recv()
    except EOFError:
        process.join()
        row = {FAILED: f"ended with {process.exitcode}"}
    process.kill()
    process.join()
    return row


def _send(act: Callable[[], Row], there: Connection) -> None:
    try:
        row = act()
    except torch.OutOfMemoryError:
        row = {FAILED: "out of memory on the device"}
    except ModuleNotFoundError as error:
        row = {FAILED: f"not installed: {error.name}"}
    except Exception as error:  # a rival that breaks is a result
        row = {FAILED: " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    there.send(row)


def work(case: Case, contender: Contender, terms: Terms, passes: int) -> Row:
    """The same pass again and again, in a process that has not touched the device before."""
    cuda = terms.device.type == "cuda"
    if cuda and terms.budget:
        total = torch.cuda.get_device_properties(terms.device).total_memory
        torch.cuda.set_per_process_memory_fraction(terms.budget / total, terms.device)
    torch.set_num_threads(os.cpu_count() or 1)
    started = time.perf_counter()
    call = contender(case.module, terms)
    inputs = {name: tensor.to(terms.device) for name, tensor in case.inputs.items()}
    row: Row = {"setup_seconds": round(time.perf_counter() - started, 3)}
    taken, outputs = [], set()
    for _ in range(passes):
        taken.append(_timed(lambda: call(**inputs, return_dict=False)[0], cuda))
        output = taken[-1][2].cpu()
        outputs.add(hashlib.sha256(output.contiguous().view(torch.uint8).numpy()).hexdigest())
    row |= {"first_seconds": taken[0][0], "seconds_of_passes": [seconds for seconds, _, _ in taken]}
    row["seconds"] = statistics.median(seconds for seconds, _, _ in taken[1:])
    row["host_seconds"] = statistics.median(issued for _, issued, _ in taken[1:])
    return row | {"outputs": sorted(outputs), "finite": bool(output.isfinite().all())} | _memory(cuda)


def _timed(call: Callable[[], torch.Tensor], cuda: bool) -> tuple[float, float, torch.Tensor]:
    """Seconds until the device was done, seconds until the host was, and the output."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    started = time.perf_counter()
    with torch.no_grad():
        output = call()
    issued = time.perf_counter() - started
    wait()
    return time.perf_counter() - started, issued, output


def _memory(cuda: bool) -> Row:
    """Peaks of torch's allocators; and RAM that is this process's alone: the weights it was forked with are not."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    if not cuda:
        return {"private_host_bytes": private}
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak"),  # by torch; not what is registered
        "private_host_bytes": private,
    }


def link_rate(device: torch.device) -> Row:
    """Bytes per second from page-locked memory to the device."""
    cuda = device.type == "cuda"
    source = torch.ones(2**29 if cuda else 2**26, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device)
    copies = [_timed(lambda: target.copy_(source, non_blocking=True), cuda)[0] for _ in range(6)]
    return {"rate": source.nbytes / statistics.median(copies[1:])}


def rounds_of(case: Case, wishes: argparse.Namespace) -> Iterator[Row]:
    """All rows of one model, as they come: in each round first the one with everything on the device."""
    reference = None
    for number in range(wishes.rounds):
        free = Terms(wishes.device, None, case.weights)
        device = forked(lambda free=free: work(case, on_device, free, wishes.passes), wishes.limit)
        link = forked(lambda: link_rate(wishes.device), wishes.limit)
        if FAILED in device or FAILED in link:
            raise SystemExit(f"{case.model} on the device: {(device | link)[FAILED]}")
        reference = reference or device["outputs"]
        beside = max(0, device.get("peak_reserved", 0) - case.weights)
        about = {"model": case.model, "weights_bytes": case.weights, "link_rate": link["rate"], "round": number}
        yield about | {"contender": "on-device", "budget": None, "same_bits": device["outputs"] == reference} | device
        for budget, name in itertools.product(wishes.budgets or tiny_budgets(case), wishes.only):
            terms = Terms(wishes.device, budget, budget - beside - wishes.margin)
            row = forked(
                lambda name=name, terms=terms: work(case, CONTENDERS[name], terms, wishes.passes), wishes.limit
            )
            bound = max(device["seconds"], (case.weights - terms.weights) / link["rate"])
            row |= about | {"contender": name, "budget": budget, "weights": terms.weights, "bound_seconds": bound}
            row["same_bits"] = row["outputs"] == reference if "outputs" in row else None
            row["to_bound"] = row["seconds"] / bound if "seconds" in row else None
            yield row


def tiny_budgets(case: Case) -> list[int]:
    return [round(case.weights * share) for share in (0.3, 0.5, 0.8)]


def line_of(row: Row) -> str:
    budget = "all" if row["budget"] is None else format_bytes(row["budget"])
    text = f"{row['round'] + 1}  {row['model']:12} {budget:>8}  {row['contender']:13}"
    if "seconds" in row:
        bits = "same bits" if row["same_bits"] else "OTHER BITS"
        text += f" first {row['first_seconds']:7.3f} s  then {row['seconds']:7.3f} s  host {row['host_seconds']:7.3f} s"
        text += f"  {bits}  reserved {format_bytes(row.get('peak_reserved', 0)):>8}"
        text += f"  pinned {format_bytes(row.get('pinned_bytes') or 0):>8}"
    if row.get("to_bound"):
        text += f"  {row['to_bound']:.2f} × bound of {row['bound_seconds']:.3f} s"
    return f"{text} {row.get(FAILED, '')}".rstrip()


def read_wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Weights larger than a card; --dry tries it out on the CPU.")
    parser.add_argument("--models", default="flux.1-dev,wan-2.1-14b")
    parser.add_argument("--budgets", default="8GB,12GB,20GB", help="bytes that the allocator may reserve")
    parser.add_argument("--margin", type=parse_bytes, default="256MB", help="of a budget, left unused")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=4, help="of which the first is told apart")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders beside the one on the device")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; writes no results")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a contender is stopped")
    wishes = parser.parse_args()
    wishes.device = torch.device("cpu" if wishes.dry else "cuda")
    wishes.margin = 0 if wishes.dry else wishes.margin
    wishes.budgets = [] if wishes.dry else [parse_bytes(budget) for budget in wishes.budgets.split(",")]
    wishes.only, wishes.models = wishes.only.split(","), wishes.models.split(",")
    unknown = set(wishes.only) - set(CONTENDERS)
    if unknown or wishes.passes < 2:
        parser.error(f"--only takes {', '.join(CONTENDERS)}; --passes at least 2")
    return wishes


def main() -> None:
    wishes = read_wishes()
    torch.set_num_threads(1)  # here: a process with more threads than one cannot be forked safely
    rows: list[Row] = []
    for model in wishes.models:
        for row in rounds_of(make_case(model, wishes.dry), wishes):
            rows.append(row)
            print(line_of(row), flush=True)
            if not wishes.dry:
                write("weights-cuda", {"summary": summary(rows, ("model", "budget"), VALUES), "rows": rows})


if __name__ == "__main__":
    main()
