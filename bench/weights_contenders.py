"""One contender of bench/weights.py: loads a model whose weights lie on disk, and works some passes.

    python bench/weights_contenders.py '{"contender": "mmap", …}'       the fields of a Task
    python bench/weights_contenders.py '{"contender": "make", …}'       writes the model's checkpoint

Prints one JSON object a line for each thing that happens, when it happens, because it may be killed at any time.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading

SEED = 0
HEADS = {"full": 12, "small": 4}  # 890.9 M parameters, 102 M
RING = 64 * 2**20  # of our bytes for weights, what is for those on their way: rivals get it beside their residents, too
BFLOAT16 = torch.bfloat16

Call = Any  # a model, or whatever is called like one


@dataclass(frozen=True)
class Task:
    """What one child does."""

    contender: str
    size: str  # of HEADS
    model: str  # the checkpoint's folder
    own: str = ""  # a folder for files that the contender makes for itself
    passes: int = 0
    weights: int = 0  # bytes that weights may take: residents and those on their way
    tokens: tuple[int, int] = (256, 64)  # of picture and text


def configuration(size: str) -> dict[str, Any]:
    """FLUX.1's shape with 2 + 20 blocks, as narrow as `size` says."""
    return {
        "num_layers": 2,
        "num_single_layers": 20,
        "attention_head_dim": 128,
        "num_attention_heads": HEADS[size],
        "joint_attention_dim": 1024,
        "pooled_projection_dim": 768,
        "axes_dims_rope": (16, 56, 56),
    }


def make(task: Task) -> None:
    """The checkpoint, in four shards: weights as torch initialises them, in bfloat16."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(BFLOAT16)
    model = FluxTransformer2DModel(**configuration(task.size))
    total = sum(parameter.nbytes for parameter in model.parameters())
    partial = Path(task.model).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, max_shard_size=int(total * 0.27))
    partial.rename(task.model)


def make_inputs(tokens: tuple[int, int]) -> dict[str, torch.Tensor]:
    image, text = tokens
    drawn = torch.Generator().manual_seed(SEED)
    side = torch.arange(math.isqrt(image))
    places = torch.cartesian_prod(torch.zeros(1, dtype=side.dtype), side, side)
    return {
        "hidden_states": torch.randn(1, len(places), 64, generator=drawn).to(BFLOAT16),
        "encoder_hidden_states": torch.randn(1, text, 1024, generator=drawn).to(BFLOAT16),
        "pooled_projections": torch.randn(1, 768, generator=drawn).to(BFLOAT16),
        "timestep": torch.tensor([0.5], dtype=BFLOAT16),
        "img_ids": places.to(BFLOAT16),
        "txt_ids": torch.zeros(text, 3, dtype=BFLOAT16),
    }


def mapped(task: Task) -> FluxTransformer2DModel:
    """The checkpoint mapped into memory: nothing is read before it is used, and the kernel may forget it again."""
    return FluxTransformer2DModel.from_pretrained(task.model, torch_dtype=BFLOAT16).requires_grad_(False)


def in_memory(task: Task) -> Call:
    """Just loaded. What tightfit imports is imported too, so that this child's baseline counts for ours."""
    import tightfit

    _ = tightfit.load
    tell(baseline=memory_now())
    return mapped(task)


def ours(task: Task) -> Call:
    import tightfit

    load = tightfit.load
    tell(baseline=memory_now())
    component = {"placement": "stream", "offload_to": "disk", "weight_memory": task.weights}
    plan = {"components": {"model": component}}
    return load(Path(task.model), plan=plan, device="cpu", dtype="bfloat16", count_activations=False).pipe


def disk_offload(task: Task) -> Call:
    from accelerate import disk_offload as offload

    tell(baseline=memory_now())
    return offload(mapped(task), task.own, execution_device=torch.device("cpu"))


def group_offload(**level: Any) -> Callable[[Task], Call]:
    """diffusers' group offloading, the groups' files on disk. Its streams need an accelerator."""

    def contender(task: Task) -> Call:
        tell(baseline=memory_now())
        model = mapped(task)
        cpu = torch.device("cpu")
        apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_to_disk_path=task.own, **level)
        return model

    return contender


def residents(task: Task) -> Call:
    """accelerate's own device map: the first modules in RAM, as many as ours may hold, and the rest on disk."""
    from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch

    tell(baseline=memory_now())
    with init_empty_weights():
        model = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(task.model))
    room: dict[int | str, int | str] = {"cpu": max(task.weights - RING, 0), "disk": 2**50}
    whole = list(model._no_split_modules)
    where = infer_auto_device_map(model.to(BFLOAT16), max_memory=room, no_split_module_classes=whole, dtype=BFLOAT16)
    return load_checkpoint_and_dispatch(
        model.requires_grad_(False), task.model, device_map=where, offload_folder=task.own, dtype=BFLOAT16
    )


def kernel_evicts(task: Task) -> Call:
    tell(baseline=memory_now())
    return mapped(task)


CONTENDERS: dict[str, Callable[[Task], Call]] = {
    "in-memory": in_memory,
    "tightfit": ours,
    "mmap": kernel_evicts,
    "disk-offload": disk_offload,
    "group-blocks": group_offload(offload_type="block_level", num_blocks_per_group=1),
    "group-leaves": group_offload(offload_type="leaf_level"),
    "residents": residents,
}


def tell(**facts: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)


def memory_now() -> dict[str, int]:
    """Bytes of this process: anonymous, and mapped from files (its libraries)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("anonymous", "RssAnon"), ("mapped", "RssFile"))}


def counters() -> dict[str, float]:
    """Running totals: seconds by the clock, of all threads' work, blocked, queued; and bytes read from the disk.

    Blocked: the main thread waited for something else than a processor. Queued: it waited for a processor, because
    others had them all; where that is not next to nothing, the machine was not quiet enough to measure on.
    """
    running, waiting, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    read = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    now = time.perf_counter()
    return {
        "seconds": now,
        "cpu_seconds": time.process_time(),
        "blocked_seconds": now - (running + waiting) / 1e9,
        "queued_seconds": waiting / 1e9,
        "read_bytes": int(read.split()[1]),
    }


def work(call: Call, task: Task) -> None:
    """The same pass again and again. The output is told as a hash of its bytes."""
    inputs = make_inputs(task.tokens)
    for _ in range(task.passes):
        before = counters()
        with torch.no_grad():
            output = call(**inputs, return_dict=False)[0]
        after = counters()
        numbers = output.contiguous().view(torch.uint8).numpy()
        tell(
            **{name: after[name] - before[name] for name in after},
            output=hashlib.sha256(numbers).hexdigest(),
            finite=bool(output.isfinite().all()),
        )


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    if task.contender == "make":
        make(task)
        return
    try:
        call = CONTENDERS[task.contender](task)
        tell(ready=True)
        work(call, task)
    except Exception as error:  # a rival that breaks is a result
        tell(failed=f"{type(error).__name__}: {error}".splitlines()[0])
        raise


if __name__ == "__main__":
    main()
