"""What bench/weights_gpu.py compares: two denoisers in RAM, and ways to run them on a device too small for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from measuring import fill_at_random
from tightfit.catalog.known import KnownComponent, known_model
from tightfit.measure.build_models import build_part
from tightfit.measure.modules import weight_bytes

HOST_COPIES = 2.3  # RAM for each byte of weights: the masters, a page-locked copy, and what is on its way
BFLOAT16, LONG = torch.bfloat16, torch.int64
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Case:
    """A denoiser in RAM, and what one pass of it takes."""

    model: str
    module: nn.Module
    inputs: dict[str, torch.Tensor]
    weights: int  # bytes


@dataclass(frozen=True)
class Terms:
    """Under which a contender works."""

    device: torch.device
    budget: int | None  # bytes that the allocator may reserve
    weights: int  # bytes of it that weights may take, those on their way included


def shapes_of(model: str, tiny: bool) -> Shapes:
    if model.startswith("flux"):
        image, text = (64, 16) if tiny else (4096, 512)
        return {
            "hidden_states": ((1, image, 64), BFLOAT16),
            "encoder_hidden_states": ((1, text, 4096), BFLOAT16),
            "pooled_projections": ((1, 768), BFLOAT16),
            "timestep": ((1,), BFLOAT16),
            "img_ids": ((image, 3), BFLOAT16),
            "txt_ids": ((text, 3), BFLOAT16),
            "guidance": ((1,), torch.float32),
        }
    return {
        "hidden_states": ((1, 16, 3, 8, 8) if tiny else (1, 16, 21, 60, 104), BFLOAT16),
        "timestep": ((1,), LONG),
        "encoder_hidden_states": ((1, 16 if tiny else 512, 4096), BFLOAT16),
    }


def make_case(model: str, tiny: bool) -> Case:
    part = known_model(model).components["transformer"]
    if tiny:
        narrow = {"num_attention_heads": 2} | ({"ffn_dim": 512} if "ffn_dim" in part.config else {})
        part = with_config(part, narrow)
    else:
        part = fewer_blocks(part, psutil.virtual_memory().available / HOST_COPIES)
    module: nn.Module = build_part("transformer", part, BFLOAT16)
    fill_at_random(module)
    drawn = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.full(shape, 500, dtype=dtype) if dtype == LONG else torch.rand(shape, generator=drawn).to(dtype)
        for name, (shape, dtype) in shapes_of(model, tiny).items()
    }
    return Case(model, module, inputs, weight_bytes(module))


def with_config(part: KnownComponent, changes: dict[str, Any]) -> KnownComponent:
    return part.model_copy(update={"config": part.config | changes})


def fewer_blocks(part: KnownComponent, room: float) -> KnownComponent:
    """`part` as it is where its weights take no more than `room` bytes, else with as many blocks as do."""
    share = min(1.0, room / (2 * (part.parameters or 0) + 1))
    counts = {name: part.config[name] for name in ("num_layers", "num_single_layers") if name in part.config}
    return with_config(part, {name: max(1, math.floor(count * share)) for name, count in counts.items()})


def on_device(module: nn.Module, terms: Terms) -> Any:
    return module.to(terms.device)


def ours(module: nn.Module, terms: Terms) -> Any:
    import tightfit

    device = "loopback" if terms.device.type == "cpu" else str(terms.device)
    component = {"placement": "stream", "weight_memory": terms.weights}
    tightfit.fit(module, plan={"components": {"model": component}}, device=device, count_activations=False)
    return module


def group_offload(**level: Any) -> Callable[[nn.Module, Terms], Any]:
    """diffusers' group offloading at its fastest: with a stream, and memory page-locked beforehand."""

    def contender(module: nn.Module, terms: Terms) -> Any:
        from diffusers.hooks import apply_group_offloading

        stream = terms.device.type != "cpu"
        apply_group_offloading(module, onload_device=terms.device, use_stream=stream, record_stream=stream, **level)
        return module

    return contender


def whole_model(module: nn.Module, terms: Terms) -> Any:
    """As `enable_model_cpu_offload` does: all of it comes with the first pass, and stays while passes follow."""
    from accelerate import cpu_offload_with_hook

    return cpu_offload_with_hook(module, terms.device)[0]


def sequential(module: nn.Module, terms: Terms) -> Any:
    """As `enable_sequential_cpu_offload` does."""
    from accelerate import cpu_offload

    return cpu_offload(module, terms.device, offload_buffers=len(module._parameters) > 0)


def block_pin(module: nn.Module, terms: Terms) -> Any:
    """diffusers-mm: everything but one list of blocks, and as many of these as there is room for; the rest streamed."""
    from diffusers_mm.block_pin import apply_block_pin, find_largest_block_list
    from diffusers_mm.block_pin import non_block_size_bytes as size_outside
    from diffusers_mm.block_pin import per_block_size_bytes as size_of_one

    found = find_largest_block_list(module)
    assert found is not None
    name, blocks = found
    count = (terms.weights - size_outside(module, name)) // size_of_one(blocks) - 1  # one for what is on its way
    streamed = {"onload_device": terms.device, "offload_device": torch.device("cpu"), "offload_type": "leaf_level"}
    stream = {"use_stream": terms.device.type != "cpu", "low_cpu_mem_usage": False}
    apply_block_pin(module, name, blocks, max(0, count), terms.device, offload_kwargs=streamed | stream)
    return module


def mmgp(module: nn.Module, terms: Terms) -> Any:
    from mmgp import offload

    budgets = {"transformer": terms.weights / 2**20}  # as a mapping: a plain number is not looked at by mmgp 3.8.2
    offload.all({"transformer": module}, pinnedMemory=True, quantizeTransformer=False, budgets=budgets, verboseLevel=0)
    return module


CONTENDERS: dict[str, Callable[[nn.Module, Terms], Any]] = {
    "tightfit": ours,
    "group-leaves": group_offload(offload_type="leaf_level"),
    "group-blocks": group_offload(offload_type="block_level", num_blocks_per_group=1),
    "whole-model": whole_model,
    "sequential": sequential,
    "diffusers-mm": block_pin,
    "mmgp": mmgp,
}
