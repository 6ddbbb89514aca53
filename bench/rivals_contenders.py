"""What bench/rivals.py and rivals_gpu.py compare with tightfit: others' ways with pipelines too large for a card."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tightfit.catalog.known import known_model
from tightfit.measure.modules import find_components, find_role
from tightfit.schema.request import Request

Row = dict[str, Any]
Contender = Callable[[Any, torch.device], Any]  # takes a pipeline in RAM, returns it ready to be called
OURS, MODELS = "tightfit", "sdxl,flux.1-dev,cogvideox-5b,wan-2.1-14b"
STEPS = 4  # that others than tightfit do …
ALIKE = 0.005  # … and how far the last two may be from their mean, of it, to be called steady
SMALLER = {
    "sdxl": {"height": 512, "width": 512},
    "flux.1-dev": {"height": 512, "width": 512},
    "wan-2.1-14b": {"height": 480, "width": 832},
}
LEAVES, BLOCKS = {"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}
ROOMY = 1024.0  # GiB of RAM: nobody is to spare it


def requests_of(model: str) -> list[Request]:
    """What `model` is usually asked for, and something smaller, for which weights are more of the work."""
    usual = known_model(model).request
    return [usual, *(usual.model_copy(update=sides) for sides in [SMALLER.get(model)] if sides)]


class Clock:
    """When a call began, when its steps were done, and when it was; `now` makes marks, between which are `seconds`."""

    def __init__(self, now: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        self._now, self._seconds = now, seconds
        self.start()

    def start(self) -> None:
        self._marks = [self._now()]

    def stop(self) -> None:
        self._marks.append(self._now())

    def mark(self, pipe: Any, step: int, time: Any, given: Any) -> Any:
        """For `callback_on_step_end`."""
        self._marks.append(self._now())
        return given

    @property
    def steps(self) -> int:
        """How many have been done."""
        return len(self._marks) - 1

    def row(self, steps: int) -> Row:
        """What a step and the call took in seconds; had it done as many `steps`, these had been like the last two."""
        *times, after = [self._seconds(*pair) for pair in itertools.pairwise(self._marks)]
        last = sum(times[-2:]) / 2
        steady = abs(times[-1] - last) <= ALIKE * last
        call = sum(times) + after + (steps - len(times)) * last
        return {"step": sum(times[1:]) / len(times[1:]), "call": call, "steady": steady}


def on_device(pipe: Any, device: torch.device) -> Any:
    return pipe.to(device)


def model_offload(pipe: Any, device: torch.device) -> Any:
    pipe.enable_model_cpu_offload(device=device)
    return pipe


def sequential_offload(pipe: Any, device: torch.device) -> Any:
    pipe.enable_sequential_cpu_offload(device=device)
    return pipe


def group_offload(level: dict[str, Any]) -> Contender:
    """At its fastest: with a stream, and all weights page-locked beforehand.

    Autoencoders by leaves, as diffusers' pages have it: with blocks, those of some are left in RAM when they decode.
    """

    def contender(pipe: Any, device: torch.device) -> Any:
        from diffusers.hooks import apply_group_offloading

        for name, network in find_components(pipe).items():
            how = LEAVES if find_role(name, network) == "autoencoder" else level
            apply_group_offloading(network, onload_device=device, use_stream=True, record_stream=True, **how)
        return pipe

    return contender


def automatic(pipe: Any, device: torch.device) -> Any:
    """diffusers-mm's own choice."""
    from diffusers_mm import managed, manager

    if device.type == "cuda":
        return managed(pipe, device=device)
    _teach(manager, device)
    chooser = manager.ModelManager(strategy="auto")
    chooser._detect_available_ram_gb = lambda: (ROOMY, ROOMY)
    return managed(pipe, mm=chooser, device=device)


def _teach(manager: ModuleType, device: torch.device) -> None:
    """Lets diffusers-mm, which asks `torch.cuda` and knows no other cards, ask the simulated ones in the same way."""
    asked = torch.get_device_module(device)

    def properties(of: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=asked.mem_get_info(of)[1])

    names = ("is_available", "device_count", "mem_get_info", "memory_allocated", "memory_reserved", "empty_cache")
    cuda = SimpleNamespace(**{name: getattr(asked, name) for name in names} | {"get_device_properties": properties})
    source = Path(manager.__file__).read_text().replace('"cuda"', f'"{device.type}"').replace("torch.cuda", "_cuda")
    vars(manager)["_cuda"] = cuda
    exec(compile(source, manager.__file__, "exec"), vars(manager))


CONTENDERS: dict[str, Contender] = {
    "all on the card": on_device,
    "diffusers: models": model_offload,
    "diffusers: leaves": group_offload(LEAVES),
    "diffusers: blocks": group_offload(BLOCKS),
    "diffusers: sequential": sequential_offload,
    "diffusers-mm": automatic,
}
