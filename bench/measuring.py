"""What the benches share: one way to count bytes and time for everybody, and one way to write it down."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.devices.choose import find_machine
from tightfit.files import replacing
from tightfit.measure.meter import TensorMeter

RESULTS = Path(__file__).parent / "results"


class Peak:
    """The most bytes of tensors that were alive at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def change(self, difference: int) -> None:
        self.now += difference
        self.most = max(self.most, self.now)


@contextlib.contextmanager
def counting() -> Iterator[Peak]:
    peak = Peak()
    with torch.no_grad(), TensorMeter(peak.change):
        yield peak


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    with torch.no_grad():
        call()
    return time.perf_counter() - started


def side_by_side(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns (A B C A B C …) so that noise hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        seconds_of(call)  # warm
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(seconds_of(call))
    return {name: statistics.median(times) for name, times in taken.items()}


def fill_at_random(network: nn.Module) -> None:
    """Gives `network`, whose large tensors are on "meta", numbers on the CPU: small ones, drawn once and repeated."""
    drawn = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 0.02
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    numbers = _repeated(drawn.to(tensor.dtype), tensor.numel()).view(tensor.shape)
                    tensors[name] = (
                        nn.Parameter(numbers, requires_grad=False) if tensors is module._parameters else numbers
                    )


def _repeated(few: torch.Tensor, count: int) -> torch.Tensor:
    numbers = torch.empty(count, dtype=few.dtype)
    whole = count // len(few) * len(few)
    numbers[:whole].view(-1, len(few)).copy_(few.expand(whole // len(few), -1))
    numbers[whole:] = few[: count - whole]
    return numbers


def write(name: str, facts: dict[str, Any]) -> None:
    """bench/results/NAME.json, with the machine and the versions it was measured on."""
    machine = find_machine()
    where = {
        "accelerator": machine.accelerators[0].name,
        "cores": machine.cores,
        "cpu": _cpu(),
        **{library: version(library) for library in ("torch", "diffusers", "transformers", "tightfit")},
    }
    with replacing(RESULTS / f"{name}.json") as partial:
        partial.write_text(json.dumps({"machine": where, **facts}, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
