"""Attention as torch puts it together on CUDA: which kernel takes it, and what becomes of its mask.

`scaled_dot_product_attention` is put together from other operations everywhere, but for a device written in Python
torch only ever takes the path of plain products, and so the choice is made here, by CUDA's rules in
aten/src/ATen/native/transformers: attention.cpp, sdp_utils_cpp.h, cuda/sdp_utils.cpp, cuda/attention.cu (torch 2.11
to 2.13). What `torch.nn.attention.sdpa_kernel` forbids is not chosen.

- flash takes half precision without a mask on compute capability 8.0 and above, heads of up to 256, grouped or not.
  Heads that are no multiple of 8 are padded. Its output is laid out like the queries, and it leaves one float32 for
  each query.
- memory-efficient takes masks, float32 and heads of any size that is a multiple of 8 (float32: 4). A mask is extended
  where its rows do not begin at multiples of 8. Its output has heads inside positions.
- cuDNN comes first on 9.0, 10.0 and 10.3; half precision, heads of up to 128, laid out like the queries.
- math is left: 16 bits become 32 first, and there is a matrix of scores for each head.

Truth values become a mask to add, in the dtype of the queries, before any of them. A card that plays a computer's
own CPU has the CPU's kernel, laid out like the queries with a float32 for each, and plain products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from tightfit.pretend.storage import store_of

__all__ = ["attend"]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_ENABLED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.MATH: torch._C._get_math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch._C._get_flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch._C._get_mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch._C._get_cudnn_sdp_enabled,
}
_USUAL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]


_WITH_MASKS = {
    SDPBackend.EFFICIENT_ATTENTION: _aten._scaled_dot_product_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: _aten._scaled_dot_product_cudnn_attention,
}
_CPU = (0, 0)


@dataclass(frozen=True)
class _Call:
    """What a kernel is asked to take, on which card."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]  # _CPU of what is no card

    @property
    def half(self) -> bool:
        return self.query.dtype in _HALVES

    @property
    def heads_match(self) -> bool:
        """Whether queries, keys and values have heads of the same size."""
        return self.query.shape[-1] == self.key.shape[-1] == self.value.shape[-1]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` on a card."""
    capability = _capability(query)
    kernel = _choose(_Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability))
    mask = _added(attn_mask, query.dtype)
    if kernel == SDPBackend.EFFICIENT_ATTENTION and mask is not None:
        mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
    if kernel == SDPBackend.MATH:
        inputs = (query, key, value, mask, dropout_p, is_causal)
        result = _aten._scaled_dot_product_attention_math(*inputs, scale=scale, enable_gqa=enable_gqa)
    elif capability == _CPU:
        fused = _aten._scaled_dot_product_flash_attention_for_cpu
        result = fused(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    elif kernel == SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    else:
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        result = _WITH_MASKS[kernel](query, key, value, mask, keeps, dropout_p, is_causal, scale=scale)
    output: torch.Tensor = result[0]
    return output


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    width = query.shape[-1]
    padded = [part if width % 8 == 0 else F.pad(part, (0, -width % 8)) for part in (query, key, value)]
    scale = 1 / math.sqrt(width) if scale is None else scale
    output: torch.Tensor = _aten._scaled_dot_product_flash_attention(*padded, dropout, causal, scale=scale)[0]
    return output if width % 8 == 0 else output[..., :width]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`mask` to be added to scores (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """`mask` with rows that begin at multiples of 8 (`preprocess_mask`, `pad_bias`)."""
    if all(step % 8 == 0 for step in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


# which kernel takes it


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the card that `tensor` is on; where nobody says, that of the oldest card with all kernels."""
    accelerator = store_of(tensor).card.accelerator
    if accelerator.is_cpu:
        return _CPU
    major, _, minor = (accelerator.compute_capability or "8.0").partition(".")
    return int(major), int(minor or 0)


def _choose(call: _Call) -> SDPBackend:
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"{call.query.dtype}, {call.key.dtype} and {call.value.dtype}"
        )
    takes = _ON_A_CPU if call.capability == _CPU else _TAKES
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    order = [kernel for kernel in order if kernel in takes]
    if order == _USUAL and call.capability in ((9, 0), (10, 0), (10, 3)):
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    for kernel in order:
        if _ENABLED[kernel]() and takes[kernel](call):
            return kernel
    place = "the CPU" if call.capability == _CPU else f"compute capability {call.capability[0]}.{call.capability[1]}"
    raise RuntimeError(
        f"No available kernel. Of those that sdpa_kernel allows, none takes queries of shape {tuple(call.query.shape)} "
        f"in {call.query.dtype}{'' if call.mask is None else ' with a mask'} on {place}: allow SDPBackend.MATH"
    )


def _flash_takes(call: _Call) -> bool:
    return (
        call.capability >= (8, 0)
        and call.half
        and call.mask is None
        and _dense(call, grouped=call.grouped)
        and call.heads_match
        and call.query.shape[-1] <= 256
        and not (call.causal and call.query.shape[-2] != call.key.shape[-2])
    )


def _efficient_takes(call: _Call) -> bool:
    major = call.capability[0]
    if call.query.dtype not in (torch.float16, torch.float32, *([torch.bfloat16] if major >= 8 else [])):
        return False
    step = (8 if call.half else 4) if major >= 8 else 8 if call.half and major == 7 else 1
    widths = (call.query.shape[-1], call.value.shape[-1])
    return (
        call.capability >= (5, 0)
        and _dense(call, grouped=False)
        and call.key.shape[-1] == widths[0]
        and all(width > 0 and width % step == 0 for width in widths)
    )


def _cudnn_takes(call: _Call) -> bool:
    widths = (call.query.shape[-1], call.value.shape[-1])
    return (
        call.capability >= (8, 0)
        and call.half
        and (call.mask is None or call.mask.ndim in (2, 4))
        and _dense(call, grouped=call.grouped)
        and call.key.shape[-2] > 1
        and all(width <= 128 and width % 8 == 0 for width in widths)
    )


def _cpu_takes(call: _Call) -> bool:
    added = call.mask is None or call.mask.ndim in (2, 4)
    return added and call.dropout == 0 and call.heads_match and _dense(call, grouped=call.grouped)


_Takes = dict[SDPBackend, Callable[[_Call], bool]]
_TAKES: _Takes = {
    SDPBackend.FLASH_ATTENTION: _flash_takes,
    SDPBackend.EFFICIENT_ATTENTION: _efficient_takes,
    SDPBackend.CUDNN_ATTENTION: _cudnn_takes,
    SDPBackend.MATH: lambda call: True,
}
_ON_A_CPU: _Takes = {SDPBackend.FLASH_ATTENTION: _cpu_takes, SDPBackend.MATH: lambda call: True}


def _dense(call: _Call, *, grouped: bool) -> bool:
    """What all fused kernels want: four dimensions, something to attend to, the last dimension in a row."""
    parts = (call.query, call.key, call.value)
    if any(part.ndim != 4 or part.shape[0] != call.query.shape[0] or part.stride(-1) != 1 for part in parts):
        return False
    heads, others = call.query.shape[1], (call.key.shape[1], call.value.shape[1])
    fits = all(heads % other == 0 for other in others) if grouped else others == (heads, heads)
    mask_in_a_row = call.mask is None or call.mask.stride(-1) == 1
    return fits and (mask_in_a_row or call.capability == _CPU) and min(call.query.shape[-2], call.key.shape[-2]) > 0
