"""The card itself: what it is, its rates, and its kernels' times beside those of the simulated clock."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from torch.nn import functional as F

from gpu_report_steps.plan import Step
from gpu_report_steps.records import Record
from tightfit.catalog.known import card_names, known_card
from tightfit.devices.choose import choose_device
from tightfit.measure.rates import device_rates
from tightfit.run.planning_context import machine_of
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.machine import Accelerator
from tightfit.simulator.kernel_costs import KernelCost, duration
from tightfit.simulator.operations import NAME

__all__ = ["LIBRARIES", "catalog_card", "clock", "rates", "this_card", "versions"]

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "diffusers-mm", "numpy", "triton", "tightfit")
RUNS = 5


def installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = None
    return found


def driver_version() -> str | None:
    """The driver's, as nvidia-smi says; None where there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def versions(record: Record, step: Step) -> None:
    card = torch.cuda.get_device_properties(0)
    record.add(
        card=card.name,
        bytes=card.total_memory,
        compute_capability=f"{card.major}.{card.minor}",
        multiprocessors=card.multi_processor_count,
        driver=driver_version(),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        python=sys.version.split()[0],
        system=platform.platform(),
        cores=os.cpu_count(),
        ram=psutil.virtual_memory().total,
        **installed(),
    )


def this_card() -> Accelerator:
    """The card with its measured rates, as plans use them."""
    return machine_of(choose_device("cuda")).accelerators[0]


def catalog_card(name: str) -> Accelerator | None:
    """The catalog's card of a product name ("NVIDIA H100 80GB HBM3"): whose every word is in it; the longest."""
    words = set(name.upper().replace("80GB", "80 GB").split())
    cards = [known_card(each) for each in card_names()]
    fitting = [card for card in cards if card.name.upper().split()[0] in words or card.name.upper() in name.upper()]
    near = [card for card in fitting if abs(card.bytes - torch.cuda.get_device_properties(0).total_memory) < 6e9]
    return max(near, key=lambda card: len(set(card.name.upper().split()) & words), default=None)


def rates(record: Record, step: Step) -> None:
    device = choose_device("cuda")
    found, notes = device_rates(device, 30.0, lambda name: None)
    planned, catalog = this_card(), catalog_card(device.product_name() or "")
    for name, measured in _flat(found).items():
        clocks = _flat(catalog.to_mapping()).get(name) if catalog else None
        record.add(rate=name, measured=measured, planned=_flat(planned.to_mapping()).get(name), clock=clocks)
    for name in ("streamed_overhead", "resident_overhead"):
        record.add(rate=name, measured=getattr(planned, name), clock=getattr(catalog, name, None))
    for note in notes:
        record.add(note=note)


def _flat(fields: dict[str, Any]) -> dict[str, float]:
    names = ("memory_rate", "link_rate", "link_rate_out", "launch_overhead", "module_overhead")
    single = {name: fields[name] for name in names if fields.get(name)}
    return single | dict(fields.get("arithmetic_rates", {}))


# kernels as models call them


Make = Callable[[torch.device], Callable[[], object]]


def _linear(tokens: int, width: int, out: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        rows, weight = _random(device, tokens, width), _random(device, out, width)
        return lambda: F.linear(rows, weight)

    return make


def _attention(batch: int, heads: int, tokens: int, keys: int, width: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        query = _random(device, batch, heads, tokens, width)
        key, value = (_random(device, batch, heads, keys, width) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(query, key, value)

    return make


def _convolution(batch: int, channels: int, out: int, *sides: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        shape = (3,) * len(sides)
        maps, weight = _random(device, batch, channels, *sides), _random(device, out, channels, *shape)
        convolve: Callable[..., object] = F.conv3d if len(sides) == 3 else F.conv2d
        return lambda: convolve(maps, weight, padding=1)

    return make


def _group_norm(channels: int, side: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        maps, weight = _random(device, 1, channels, side, side), _random(device, channels)
        return lambda: F.group_norm(maps, 32, weight, weight)

    return make


def _layer_norm(tokens: int, width: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        rows = _random(device, tokens, width)
        return lambda: F.layer_norm(rows, (width,))

    return make


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


KERNELS: dict[str, Make] = {
    "linear, FLUX.1's attention": _linear(4608, 3072, 3072),
    "linear, FLUX.1's feed-forward": _linear(4608, 3072, 12288),
    "linear, Wan 14B's feed-forward": _linear(32760, 5120, 13824),
    "linear, SDXL's smallest": _linear(2048, 1280, 1280),
    "linear, one token": _linear(1, 3072, 18432),
    "attention, FLUX.1": _attention(1, 24, 4608, 4608, 128),
    "attention, SDXL at 64²": _attention(2, 10, 4096, 4096, 64),
    "attention, SDXL to 77 tokens": _attention(2, 10, 4096, 77, 64),
    "attention, Wan 14B": _attention(1, 40, 32760, 32760, 128),
    "attention, an autoencoder's": _attention(1, 1, 16384, 16384, 512),
    "convolution, SDXL's U-Net": _convolution(2, 320, 320, 128, 128),
    "convolution, SDXL's U-Net at 32²": _convolution(2, 1280, 1280, 32, 32),
    "convolution, decoder at 1024²": _convolution(1, 128, 128, 1024, 1024),
    "convolution, video decoder": _convolution(1, 192, 192, 4, 240, 416),
    "group norm, decoder at 1024²": _group_norm(128, 1024),
    "layer norm, FLUX.1": _layer_norm(4608, 3072),
}


def clock(record: Record, step: Step) -> None:
    device, card = choose_device("cuda"), this_card()
    for about in record.missing([{"kernel": name} for name in KERNELS]):
        make = KERNELS[about["kernel"]]
        predicted = _predicted(make, card)
        with torch.inference_mode():
            run = make(device.torch_device)
            run()
            device.synchronize()
            seconds = sorted(device.seconds(run) for _ in range(RUNS))[RUNS // 2]
        del run
        device.release_cache()
        record.add(**about, seconds=seconds, clock=predicted)


def _predicted(make: Make, card: Accelerator) -> float:
    """Seconds by the simulated clock, at the card's own rates."""
    costs: list[KernelCost] = []
    with unlimited_card(card) as simulated, torch.inference_mode():
        run = make(torch.device(NAME, 0))
        simulated.kernel_callbacks.append(costs.append)
        run()
    return sum(duration(cost, card) for cost in costs) / 1e9
