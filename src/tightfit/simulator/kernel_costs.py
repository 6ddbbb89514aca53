"""The cost of one operation on a card: arithmetic, memory traffic, and the bytes its kernel allocates while it runs.

Arithmetic is counted by torch's own `flop_counter` formulas; memory traffic counts each input read and each output
written once, in sectors of 32 bytes. `schema/kernel_time.py` says how long that takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tightfit.catalog.cuda import product_workspaces
from tightfit.schema.kernel_time import TILE, kernel_seconds
from tightfit.schema.machine import EXCHANGES, Accelerator, Amounts, KernelKind
from tightfit.simulator.attention_kinds import efficient_attention_kind
from tightfit.simulator.output_layouts import GROUP_NORM_KEEPS_CHANNELS_LAST, normed_by_cudnn, suggested
from tightfit.simulator.pointwise import element_divisions

__all__ = ["KernelCost", "duration", "kernel_cost_of"]

aten = torch.ops.aten
_KINDS: dict[Any, KernelKind] = {
    aten.mm: "matmul",
    aten.addmm: "matmul",
    aten.bmm: "matmul",
    aten.baddbmm: "matmul",
    aten._scaled_mm: "matmul",
    aten.convolution: "convolution",
    aten.native_group_norm: "normalization",
    aten._scaled_dot_product_cudnn_attention: "attention",
    aten._scaled_dot_product_efficient_attention: "efficient-attention",
    aten._scaled_dot_product_flash_attention: "attention",
    aten._scaled_dot_product_flash_attention_for_cpu: "attention",
}
# kernels that copy a non-contiguous first tensor, after their output is allocated …
_ON_CONTIGUOUS = {
    aten._log_softmax, aten._softmax, aten.avg_pool2d, aten.cumsum, aten.reflection_pad1d, aten.reflection_pad2d,
    aten.reflection_pad3d, aten.topk,
}  # fmt: skip
# … or before it
_ON_CONTIGUOUS_FIRST = {aten._fused_rms_norm, aten.native_layer_norm, aten.roll}
# and these copy their output too
_RESIZES = {
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
}  # fmt: skip
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}  # their matrices' positions
# the first tensor is written without being read
_OVERWRITES = {aten.copy_, aten.fill_, aten.normal_, aten.uniform_, aten.zero_}
_HALVES = (torch.float16, torch.bfloat16)
SECTOR = 32  # bytes: the least that a card reads at a time
HEAD = 32  # head dimensions are padded to a multiple of this by flash attention on cards


@dataclass(frozen=True)
class KernelCost:
    """The cost of one operation; of an exchange with other ranks, `traffic` is that of `KernelGroup`."""

    kind: KernelKind
    dtype: torch.dtype
    amounts: Amounts
    early: tuple[int, ...] = ()  # bytes of each temporary buffer that is allocated before the outputs
    held: tuple[int, ...] = ()  # … and of each that the kernel allocates after them
    workspaces: tuple[int, ...] = ()  # bytes, of cuBLAS and cuBLASLt: see `product_workspaces`
    module_calls: int = 0  # calls of modules since the kernel before


def kernel_cost_of(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    accelerator: Accelerator,
) -> KernelCost:
    """Return the cost of `op` on `args` on `accelerator`, given its input tensors and those it created or wrote."""
    kind = _KINDS.get(op.overloadpacket, "memory") if outputs else "memory"
    if kind == "efficient-attention":
        kind = efficient_attention_kind(args, accelerator.compute_capability)
    read = inputs[1:] if op.overloadpacket in _OVERWRITES else inputs
    traffic = sum(_touched(tensor) for tensor in (*read, *outputs))
    dtype = outputs[0].dtype if outputs else torch.float32
    early, held = _buffers(op, args, outputs[0], accelerator) if outputs else ((), ())
    workspaces = _workspaces(op.overloadpacket, args, kwargs, outputs[0], accelerator) if kind == "matmul" else ()
    amounts = _amounts(op, kind, args, inputs, outputs, traffic, accelerator)
    if kind == "convolution":
        amounts = amounts._replace(copied=2 * (sum(early) + sum(held)))
    return KernelCost(kind, dtype, amounts, early, held, workspaces)


def _amounts(
    op: torch._ops.OpOverload,
    kind: KernelKind,
    args: tuple[Any, ...],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    traffic: int,
    accelerator: Accelerator,
) -> Amounts:
    if kind == "memory":
        return Amounts(0, traffic, divisions=element_divisions(op, inputs, outputs))
    if kind == "normalization":  # reads its input twice: for mean and variance, and to normalize it
        _, channels, pixels, groups = args[3:7]
        return Amounts(0, traffic + _touched(args[0]), serial=channels // groups * pixels)
    if kind.endswith("attention"):
        head = 1 if accelerator.is_cpu else HEAD
        operations, padding, scores = _attention_operations(*(tensor.shape for tensor in args[:3]), head=head)
        return Amounts(operations, traffic, padding, exponentials=scores)
    operations = flop_registry[op.overloadpacket](*args, out_val=outputs[0])
    return Amounts(operations, traffic, tile_operations=TILE * TILE * operations // max(outputs[0].numel(), 1))


def duration(work: KernelCost, accelerator: Accelerator) -> int:
    """Nanoseconds that `work` takes at the rates of `accelerator`; an unknown rate counts as no time."""
    if work.kind in EXCHANGES:
        return round(accelerator.exchange_seconds(work.kind, 1, work.amounts.traffic) * 1e9)
    return round(kernel_seconds(accelerator, work.kind, str(work.dtype).removeprefix("torch."), work.amounts) * 1e9)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` in memory, in whole sectors: expanded dimensions are read once."""
    count, smallest = 1, SECTOR
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
        smallest = min(smallest, stride) if stride and length > 1 else smallest
    apart = min(smallest, SECTOR // tensor.itemsize) if count > 1 else 1
    return count * apart * tensor.itemsize


def _attention_operations(query: torch.Size, key: torch.Size, value: torch.Size, *, head: int) -> tuple[int, int, int]:
    """FLOP of the products of queries with keys and of weights with values; those that padding adds; scores."""
    scores = query[:-2].numel() * query[-2] * key[-2]
    padding = sum(-width % head for width in (query[-1], value[-1]))
    return 2 * scores * (query[-1] + value[-1]), 2 * scores * padding, scores


def _buffers(
    op: torch._ops.OpOverload, args: tuple[Any, ...], output: torch.Tensor, accelerator: Accelerator
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a kernel's temporary buffers, allocated before and after its outputs; none on a CPU.

    Not counted: the buffers of flash attention where it splits the keys of few queries among idle multiprocessors, and
    likewise of reductions with few outputs (`setReduceConfig` in cuda/Reduce.cuh); those of cuDNN's attention, cuFFT,
    and sorting.
    """
    if accelerator.is_cpu:
        return (), ()
    kernel = op.overloadpacket
    if kernel is aten.convolution:
        return _convolution(args, output, accelerator)
    if kernel in _ON_CONTIGUOUS_FIRST:
        return _copies(args[:1]), ()
    return (), _held(op, args, output)


def _held(op: torch._ops.OpOverload, args: tuple[Any, ...], output: torch.Tensor) -> tuple[int, ...]:
    kernel = op.overloadpacket
    sizes: tuple[int, ...] = ()
    if kernel in _ON_CONTIGUOUS:
        sizes = _copies(args[:1], suggested(args[0]) if kernel is aten.avg_pool2d else torch.contiguous_format)
    elif kernel in _RESIZES:
        keeps = suggested(args[0]) is torch.channels_last and args[0].shape[1] >= 4
        sizes = _copies((output, args[0]), torch.channels_last if keeps else torch.contiguous_format)
    elif kernel in _PRODUCTS:
        sizes = tuple(args[place].nbytes for place in _PRODUCTS[kernel] if not _is_matrix(args[place]))
    elif kernel is aten.native_group_norm:
        layout = suggested(args[0]) if GROUP_NORM_KEEPS_CHANNELS_LAST else torch.contiguous_format
        sizes = _copies(args[:1], layout) + _factors(*args[:6], layout=layout)
    elif kernel is aten.native_batch_norm and normed_by_cudnn(args):
        sizes = _copies(args[:1], suggested(args[0]))
    elif op is aten.pow.Scalar:
        sizes = (8,)  # the Python number, as a tensor
    elif kernel is aten._scaled_dot_product_efficient_attention:
        sizes = _accumulator(args[1:3], output)
    return sizes


def _workspaces(
    kernel: torch._ops.OpOverloadPacket,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: torch.Tensor,
    accelerator: Accelerator,
) -> tuple[int, ...]:
    if accelerator.is_cpu or not output.numel():
        return ()
    through_lt = kernel is aten._scaled_mm or (
        kernel is aten.addmm and _through_lt(args[0], args[2], kwargs.get("beta", 1), output)
    )
    return product_workspaces(accelerator.compute_capability, through_lt=through_lt)


def _through_lt(bias: torch.Tensor, right: torch.Tensor, beta: float, output: torch.Tensor) -> bool:
    """Whether cuBLASLt adds `bias` to the product, `isInputCompliesAddmmCudaLt` in cuda/Blas.cpp.

    It adds one row to all rows, and in half precision a contiguous full matrix as well.
    """
    row = bias.shape[-1] == bias.numel() == output.shape[-1] and beta == 1
    whole = bias.shape == output.shape and output.dtype in _HALVES and beta != 0
    return (row or whole) and bias.is_contiguous() and min(right.shape) > 1


def _factors(
    maps: torch.Tensor, weight: Any, bias: Any, batch: int, channels: int, pixels: int, *, layout: torch.memory_format
) -> tuple[int, ...]:
    """Bytes of the per-channel scales and shifts of group norm (cuda/group_norm_kernel.cu).

    They are always used with channels last; a single channel or a single pixel counts as that layout.
    """
    size = batch * channels * max(maps.itemsize, 4)
    as_if = GROUP_NORM_KEEPS_CHANNELS_LAST and maps.ndim > 3 and 1 in (channels, pixels)
    if layout is not torch.contiguous_format or as_if:
        return size, size
    return () if pixels == 1 or (weight is None and bias is None) else (size, size)


def _copies(
    tensors: tuple[torch.Tensor, ...], layout: torch.memory_format = torch.contiguous_format
) -> tuple[int, ...]:
    """Bytes of copies of those `tensors` that are not contiguous in `layout`."""
    return tuple(each.nbytes for each in tensors if not each.is_contiguous(memory_format=layout))


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Whether cuBLAS takes `tensor`, or each batch item, without a copy (cuda/Blas.cpp: `prepare_…_for_cublas`)."""
    if tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous()):
        return True
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)


def _accumulator(parts: tuple[torch.Tensor, ...], output: torch.Tensor) -> tuple[int, ...]:
    """Bytes of the float32 accumulator of memory-efficient attention, in half precision with head dimensions over 128.

    Registers cannot hold such outputs (`kNeedsOutputAccumulatorBuffer` in cuda/mem_eff_attention/kernel_forward.h, of
    the kernels that end in "gmem").
    """
    wide = max(part.shape[-1] for part in parts) > 128
    return (4 * output.numel(),) if wide and output.dtype in _HALVES else ()


def _convolution(
    args: tuple[Any, ...], output: torch.Tensor, accelerator: Accelerator
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of buffers before and after the output: on tensor cores, channels-last copies of input, output, weights.

    Tensors that are channels-last already are not copied. All copies are in one buffer, cuDNN's workspace. Half
    precision: https://github.com/pytorch/pytorch/issues/95024 measured one convolution (12,874,233,344 bytes), which
    matches to the last kilobyte, with the weights' copy; issues 136479 and 123533 there agree, and a trial on an RTX
    4090 brought ten autoencoder sizes from 17 % too little to within 0.3 %. Single precision, which is TensorFloat-32
    for convolutions from compute capability 8.0 on: issue 166643 measured three times the input, which is the output
    and a copy of both. Depthwise convolutions have a kernel of their own, without copies (`use_cudnn_depthwise` in
    Convolution.cpp; but for some in float16, not counted).
    """
    major = int((accelerator.compute_capability or "8").partition(".")[0])
    first, weight, groups = args[0], args[1], args[8]
    on_tensor_cores = major >= 7 if output.dtype in _HALVES else major >= 8 and output.dtype is torch.float32
    layout = next((each for each in map(suggested, (first, weight)) if each is not torch.contiguous_format), None)
    taken = [part.is_contiguous(memory_format=layout or torch.contiguous_format) for part in (first, weight)]
    early, before = (() if as_it_is else (part.nbytes,) for part, as_it_is in zip((first, weight), taken, strict=True))
    if layout is not None or not on_tensor_cores or 1 < groups == first.shape[1]:
        return early, before
    copied = (part.nbytes for part in (first, output, weight) if _has_channels_first(part))
    return early, (*before, sum(copied))


def _has_channels_first(part: torch.Tensor) -> bool:
    """Whether the contiguous `part` would have to be copied to become channels-last."""
    return part.shape[1] > 1 and part.shape[2:].numel() > 1
