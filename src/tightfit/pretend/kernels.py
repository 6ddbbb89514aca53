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

from tightfit.pretend.layouts import suggested
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
# their first tensor is written, and not read before
_OVERWRITES = {aten.copy_, aten.fill_, aten.normal_, aten.uniform_, aten.zero_}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """The cost of one operation."""

    kind: Kind
    dtype: torch.dtype
    operations: int
    bytes: int
    held: tuple[int, ...] = ()  # bytes of each buffer that its kernel allocates and gives back


def work_of(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    accelerator: Accelerator,
) -> Work:
    """What `op` on `args` costs on `accelerator`, given the tensors it took and those it made or wrote."""
    kind = _KINDS.get(op.overloadpacket, "memory")
    read = inputs[1:] if op.overloadpacket in _OVERWRITES else inputs
    traffic = sum(_touched(tensor) for tensor in (*read, *outputs))
    dtype = outputs[0].dtype if outputs else torch.float32
    if kind == "memory" or not outputs:
        return Work("memory", dtype, 0, traffic)
    if kind == "attention":
        operations = _attention_operations(*(tensor.shape for tensor in args[:3]))
    else:
        operations = flop_registry[op.overloadpacket](*args, out_val=outputs[0])
    return Work(kind, dtype, operations, traffic, _held(op, args, outputs[0], accelerator))


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


def _held(
    op: torch._ops.OpOverload, args: tuple[Any, ...], output: torch.Tensor, accelerator: Accelerator
) -> tuple[int, ...]:
    """What a kernel allocates beside its outputs; nothing on a CPU.

    What flash attention holds where it splits few queries' keys among idle processors, and what cuDNN's asks for, are
    not counted.
    """
    if accelerator.is_cpu:
        return ()
    if op.overloadpacket is aten._scaled_dot_product_efficient_attention:
        return _accumulator(args[1:3], output)
    return _channels_last(args, output, accelerator) if op.overloadpacket is aten.convolution else ()


def _accumulator(parts: tuple[torch.Tensor, ...], output: torch.Tensor) -> tuple[int, ...]:
    """Memory-efficient attention adds to a float32 output in half precision with heads of more than 128.

    Its registers do not hold them (`kNeedsOutputAccumulatorBuffer` in cuda/mem_eff_attention/kernel_forward.h, of the
    kernels that end in "gmem").
    """
    wide = max(part.shape[-1] for part in parts) > 128
    return (4 * output.numel(),) if wide and output.dtype in _HALVES else ()


def _channels_last(args: tuple[Any, ...], output: torch.Tensor, accelerator: Accelerator) -> tuple[int, ...]:
    """A convolution on tensor cores holds copies, channels last, of input, output and weights that have them first.

    All in one buffer, cuDNN's workspace. Half precision: what https://github.com/pytorch/pytorch/issues/95024 measured
    of one convolution (12,874,233,344 bytes) is that to the last kilobyte, with the weights' copy; issues 136479 and
    123533 there agree, and a trial on an RTX 4090 brought ten autoencoder sizes from 17 % too little to within 0.3 %.
    Single precision, which is TensorFloat-32 for convolutions from compute capability 8.0 on: issue 166643 measured
    three times the input, which is the output and a copy of both. Convolutions of each channel by itself have a kernel
    of their own, without copies (`use_cudnn_depthwise` in Convolution.cpp; but for some in float16, not counted).
    """
    major = int((accelerator.compute_capability or "8").partition(".")[0])
    first, weight, groups = args[0], args[1], args[8]
    on_tensor_cores = major >= 7 if output.dtype in _HALVES else major >= 8 and output.dtype is torch.float32
    if not on_tensor_cores or 1 < groups == first.shape[1]:
        return ()
    layout = next((each for each in map(suggested, (first, weight)) if each is not torch.contiguous_format), None)
    taken = [part.is_contiguous(memory_format=layout or torch.contiguous_format) for part in (first, weight)]
    before = [part.nbytes for part, as_it_is in zip((first, weight), taken, strict=True) if not as_it_is]
    if layout is not None:
        return tuple(before)
    copied = (part.nbytes for part in (first, output, weight) if _has_channels_first(part))
    return (*before, sum(copied))


def _has_channels_first(part: torch.Tensor) -> bool:
    """Whether `part`, made contiguous, would have to be copied to have its channels last."""
    return part.shape[1] > 1 and part.shape[2:].numel() > 1
