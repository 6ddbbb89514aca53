"""`scaled_dot_product_attention` as torch composes it on CUDA: which kernel runs, and how the mask is converted.

The operation is composite on all devices, but for a device written in Python torch always takes the path of plain
matrix products, so the kernel is chosen here, by CUDA's rules (`schema/attention.py`) and those of
aten/src/ATen/native/transformers: attention.cpp, cuda/attention.cu (torch 2.11 to 2.13). A kernel that
`torch.nn.attention.sdpa_kernel` forbids is not chosen.

- flash pads head dimensions that are no multiple of 8. Its output has the layout of the queries, and it returns one
  float32 for each query.
- memory-efficient gets a padded mask where the mask's rows do not begin at multiples of 8. The memory order of its
  output is batch, positions, heads.
- cuDNN's output has the layout of the queries.
- math is the fallback: 16-bit inputs are converted to 32 bits first, and there is a matrix of scores for each head.

Boolean masks become additive masks in the dtype of the queries before any of them. A simulated CPU has the CPU's
kernel, with the layout of the queries and a float32 for each, and plain products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from tightfit.schema.attention import AttentionCall, Kernel, kernel_order, unsupported
from tightfit.simulator.storage import store_of

__all__ = ["attend"]

_aten = torch.ops.aten
_NAMES: Mapping[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
_ENABLED: Mapping[Kernel, Callable[[], bool]] = {
    "math": torch._C._get_math_sdp_enabled,
    "flash": torch._C._get_flash_sdp_enabled,
    "efficient": torch._C._get_mem_efficient_sdp_enabled,
    "cudnn": torch._C._get_cudnn_sdp_enabled,
}
_WITH_MASKS = {
    "efficient": _aten._scaled_dot_product_efficient_attention,
    "cudnn": _aten._scaled_dot_product_cudnn_attention,
}

_SEED_ON_CARD = torch.__version__ >= "2.14"  # memory-efficient attention's; on the host in earlier versions


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
    """`scaled_dot_product_attention` on a card; same arguments, shapes and errors as torch's."""
    call = _describe(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = _choose(call)
    if query.ndim == 3 and kernel != "math":  # torch adds a batch dimension of 1
        mask = attn_mask[None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        item = query[None], key[None], value[None], mask, dropout_p, is_causal
        return attend(*item, scale=scale, enable_gqa=enable_gqa)[0]
    mask = _added(attn_mask, query.dtype)
    if kernel == "efficient" and mask is not None:
        mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
    if kernel == "math":
        inputs = (query, key, value, mask, dropout_p, is_causal)
        result = _aten._scaled_dot_product_attention_math(*inputs, scale=scale, enable_gqa=enable_gqa)
    elif call.device == "cpu":
        fused = _aten._scaled_dot_product_flash_attention_for_cpu
        result = fused(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    elif kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    else:
        numbers = 2 if kernel == "efficient" and _SEED_ON_CARD else 0  # its seed and offset
        random = [torch.empty((), dtype=torch.int64, device=query.device) for _ in range(numbers)]
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        result = _WITH_MASKS[kernel](query, key, value, mask, keeps, dropout_p, is_causal, scale=scale)
        del random
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
    """Convert `mask` to an additive mask (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Pad `mask` such that rows begin at multiples of 8 elements (`preprocess_mask`, `pad_bias`)."""
    if all(step % 8 == 0 for step in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


# kernel choice


def _describe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> AttentionCall:
    if len({part.dtype for part in (query, key, value)}) > 1:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    capability = _capability(query)
    return AttentionCall.of(
        query, key, value, mask, capability=capability, causal=causal, grouped=grouped, dropout=dropout
    )


def _capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the card of `tensor`; None for a simulated CPU.

    Where it is not given: 8.0, the oldest with all kernels.
    """
    accelerator = store_of(tensor).card.accelerator
    if accelerator.is_cpu:
        return None
    major, _, minor = (accelerator.compute_capability or "8.0").partition(".")
    return int(major), int(minor or 0)


def _choose(call: AttentionCall) -> Kernel:
    """Return the first kernel that supports `call`, among those that `sdpa_kernel` allows, in its priority order."""
    asked = tuple(_NAMES[number] for number in torch._C._get_sdp_priority_order() if number in _NAMES)
    for kernel in kernel_order(call, asked):
        if _ENABLED[kernel]() and unsupported(kernel, call) is None:
            return kernel
    place = "the CPU" if call.capability is None else "compute capability {}.{}".format(*call.capability)
    shape = (call.items, call.heads, call.queries, call.width)
    raise RuntimeError(
        f"No available kernel. Of those that sdpa_kernel allows, none takes queries of shape {shape} "
        f"in {call.dtype}{'' if call.mask == 'none' else ' with a mask'} on {place}: allow SDPBackend.MATH"
    )
