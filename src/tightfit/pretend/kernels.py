"""What one operation costs a card: arithmetic, memory traffic, and the bytes its kernel holds while it runs.

Arithmetic is counted by torch's own `flop_counter` formulas; traffic is every input read and every output written
once. A kernel takes the longer of the two, which is the roofline bound: real kernels are slower, by the share of the
card's rates that was measured or is assumed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from tightfit.records import Accelerator

__all__ = ["Kind", "Work", "duration", "work_of"]

Kind = Literal["matmul", "convolution", "attention", "memory"]
aten = torch.ops.aten
_KINDS: dict[Any, Kind] = {
    aten.mm: "matmul",
    aten.addmm: "matmul",
    aten.bmm: "matmul",
    aten.baddbmm: "matmul",
    aten._scaled_mm: "matmul",
    aten.convolution: "convolution",
    aten._scaled_dot_product_cudnn_attention: "attention",
    aten._scaled_dot_product_efficient_attention: "attention",
    aten._scaled_dot_product_flash_attention: "attention",
    aten._scaled_dot_product_flash_attention_for_cpu: "attention",
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """The cost of one operation, before it is known on which card."""

    kind: Kind
    dtype: torch.dtype
    operations: int
    bytes: int
    held: tuple[int, ...] = ()  # bytes of each buffer that its kernel allocates and gives back


def work_of(
    op: torch._ops.OpOverload, args: tuple[Any, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> Work:
    """What `op` on `args` costs, given the tensors it read and those it made or wrote."""
    kind = _KINDS.get(op.overloadpacket, "memory")
    traffic = sum(_touched(tensor) for tensor in (*inputs, *outputs))
    dtype = outputs[0].dtype if outputs else torch.float32
    if kind == "memory" or not outputs:
        return Work("memory", dtype, 0, traffic)
    if kind == "attention":
        operations = _attention_operations(*(tensor.shape for tensor in args[:3]))
    else:
        operations = flop_registry[op.overloadpacket](*args, out_val=outputs[0])
    return Work(kind, dtype, operations, traffic, _held(op, args, outputs[0]))


def duration(work: Work, accelerator: Accelerator) -> int:
    """Nanoseconds that `work` takes at the rates of `accelerator`; what has no rate takes no time."""
    rate = accelerator.arithmetic_rate(work.kind, str(work.dtype).removeprefix("torch."))
    arithmetic = work.operations / rate if rate else 0.0
    memory = work.bytes / accelerator.memory_rate if accelerator.memory_rate else 0.0
    return round(max(arithmetic, memory) * 1e9)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` that are there to be read: what is expanded is read once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.itemsize


def _attention_operations(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Two products: every query with every key, every weight with every value."""
    return 2 * query[:-2].numel() * query[-2] * key[-2] * (query[-1] + value[-1])


def _held(op: torch._ops.OpOverload, args: tuple[Any, ...], output: torch.Tensor) -> tuple[int, ...]:
    """What a kernel allocates beside its outputs.

    Memory-efficient attention: a float32 output to add to, in half precision with heads of more than 128, which its
    registers do not hold (`kNeedsOutputAccumulatorBuffer` in cuda/mem_eff_attention/kernel_forward.h, of the kernels
    that end in "gmem"). What flash attention holds where it splits few queries' keys among idle processors, and what
    cuDNN asks for, are not counted. Convolution: cuDNN's half-precision kernels want channels last, and hold copies
    of maps that have them first (measured in a trial on an RTX 4090 with torch 2.7.1 in float16: counting both
    brought ten autoencoder sizes from 17 % too little to within 0.3 % of the measured peaks).
    """
    if output.dtype not in _HALVES:
        return ()
    if op.overloadpacket is aten._scaled_dot_product_efficient_attention:
        return (4 * output.numel(),) if max(part.shape[-1] for part in args[1:3]) > 128 else ()
    if op.overloadpacket is aten.convolution:
        return tuple(value.nbytes for value in (args[0], output) if value.is_contiguous() and value.shape[1] > 1)
    return ()
