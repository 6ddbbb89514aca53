"""Attention backends, and which calls each supports, as its source code checks them.

`BACKENDS` is the registry: what a plan may name, besides "auto" and "torch". How each one computes is in
apply/activations/attention_dispatch.py.

torch's own kernels (aten/src/ATen/native/transformers: attention.cpp, sdp_utils_cpp.h, cuda/sdp_utils.cpp, torch 2.11
to 2.13):

- flash, if torch was compiled with it, supports half precision without a mask on compute capability 8.0 and above, and
  head sizes of up to 256, grouped or not;
- memory-efficient supports masks, float32 and head sizes that are multiples of 8 (float32: 4);
- cuDNN supports half precision and head sizes of up to 128, and is tried first on 9.0, 10.0 and 10.3;
- math supports all calls: plain matmuls, with a matrix of scores for each head.

The CPU has one fused kernel, which torch calls flash too, and math. xFormers' rules are those of its CUTLASS kernel
(ops/fmha/cutlass.py), SageAttention's those of `sageattn` (core.py, version 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, Self

from tightfit.errors import PlanError, unknown_name

__all__ = [
    "ATTENTION_NAMES",
    "BACKENDS",
    "LEAST_DIMENSIONS",
    "TORCH_ORDER",
    "AttentionBackend",
    "AttentionCall",
    "Kernel",
    "check_attention",
    "kernel_order",
    "unsupported",
]

Mask = Literal["none", "bool", "additive"]
Kernel = Literal["flash", "efficient", "cudnn", "math"]
TORCH_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")  # torch's default priority

HALVES = ("float16", "bfloat16")
LEAST_DIMENSIONS = 3 if version("torch") >= "2.14" else 4  # of queries, keys and values, for fused kernels
CUDNN_FIRST = ("9.0", "10.0", "10.3")  # compute capabilities on which torch tries cuDNN first
SAGE_CARDS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


class AttentionCall(NamedTuple):
    """A call of `scaled_dot_product_attention`, without values."""

    device: str  # "cpu", "cuda"; other devices have no rules here
    capability: tuple[int, int] | None  # of a CUDA card, e.g. (8, 9)
    dtype: str  # e.g. "float32"
    items: int  # batch size
    heads: int
    key_heads: int
    value_heads: int
    queries: int  # sequence length
    keys: int  # sequence length
    width: int  # head size of queries and keys
    value_width: int  # head size of values
    dimensions: int = 4
    mask: Mask = "none"
    mask_dimensions: int = 0
    mask_requires_grad: bool = False  # whether the mask requires gradients
    mask_in_rows: bool = True  # whether the mask's last stride is 1
    in_rows: bool = True  # whether the last strides of queries, keys and values are 1
    items_match: bool = True  # whether queries, keys and values have the same batch dimensions
    widths_match: bool = True  # whether keys have the head size of queries
    causal: bool = False
    grouped: bool = False  # enable_gqa: whether several heads of queries may share a head of keys
    dropout: float = 0.0
    flash: bool = True  # whether torch was compiled with flash attention for cards

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        *,
        capability: tuple[int, int] | None = None,
        device: str | None = None,
        causal: bool = False,
        grouped: bool = False,
        dropout: float = 0.0,
        flash: bool = True,
    ) -> Self:
        """Return the call with these tensors, of which only the metadata is used.

        With a `capability` it is on a CUDA card, without one on the CPU, unless `device` names another device.
        """
        parts = (query, key, value)
        heads, key_heads, value_heads = (part.shape[-3] if part.ndim > 2 else 1 for part in parts)
        return cls(
            device=device or ("cpu" if capability is None else "cuda"),
            capability=capability,
            dtype=str(query.dtype).removeprefix("torch."),
            items=math.prod(query.shape[:-3]),
            heads=heads,
            key_heads=key_heads,
            value_heads=value_heads,
            queries=query.shape[-2],
            keys=key.shape[-2],
            width=query.shape[-1],
            value_width=value.shape[-1],
            dimensions=query.ndim,
            mask="none" if mask is None else "bool" if str(mask.dtype) == "torch.bool" else "additive",
            mask_dimensions=0 if mask is None else mask.ndim,
            mask_requires_grad=mask is not None and mask.requires_grad,
            mask_in_rows=mask is None or mask.stride(-1) == 1,
            in_rows=all(part.stride(-1) == 1 for part in parts),
            items_match=all(part.ndim == query.ndim and part.shape[:-3] == query.shape[:-3] for part in parts),
            widths_match=key.shape[-1] == query.shape[-1],
            causal=causal,
            grouped=grouped,
            dropout=dropout,
            flash=flash,
        )

    @property
    def score_bytes(self) -> int:
        """Bytes of the whole matrix of scores, which is float32 for half-precision inputs."""
        return self.items * self.heads * self.queries * self.keys * (8 if self.dtype == "float64" else 4)


def kernel_order(call: AttentionCall, asked: tuple[Kernel, ...] = TORCH_ORDER) -> tuple[Kernel, ...]:
    """Return the kernels of the device of `call` in the order in which torch tries them; `asked`: its priority."""
    if call.device == "cpu":
        return tuple(kernel for kernel in asked if kernel in ("flash", "math"))
    first: tuple[Kernel, ...] = ("cudnn",) if asked == TORCH_ORDER and _version(call) in CUDNN_FIRST else ()
    return (*first, *asked)


def unsupported(name: str, call: AttentionCall) -> str | None:
    """Return what the backend `name` does not support of `call`, in words; None if it supports the call."""
    return BACKENDS[name].unsupported(call)


def check_attention(name: str) -> str:
    """Return `name` if it is a valid `attention` of a plan. Raises PlanError, with the nearest name, otherwise."""
    if name not in ATTENTION_NAMES:
        raise PlanError(unknown_name("attention", name, ATTENTION_NAMES), name=name)
    return name


def _not_by_flash(call: AttentionCall) -> str | None:
    if call.device == "cpu":  # torch also calls the CPU's only fused kernel flash
        return (
            _dropout(call)
            or _mask_dimensions(call)
            or ("a mask that wants gradients" if call.mask_requires_grad else None)
            or _unequal_widths(call)
            or _shape(call, grouped=call.grouped)
        )
    return (
        (None if call.flash else "anything: torch was compiled without it")
        or _card(call, (8, 0), HALVES)
        or ("a mask" if call.mask != "none" else None)
        or _unequal_widths(call)
        or (f"heads of {call.width}, more than 256" if call.width > 256 else None)
        or _uneven_causality(call)
        or _shape(call, grouped=call.grouped)
    )


def _not_by_efficient(call: AttentionCall) -> str | None:
    major = (call.capability or (0, 0))[0]
    step = {"float32": 4}.get(call.dtype, 8) if major >= 8 else 8 if call.dtype in HALVES and major == 7 else 1
    return (
        _card(call, (5, 0), ("float32", "float16", *(["bfloat16"] if major >= 8 else [])))
        or _odd_widths(call, step)
        or _shape(call, grouped=False)
    )


def _not_by_cudnn(call: AttentionCall) -> str | None:
    widest = max(call.width, call.value_width)
    return (
        _card(call, (8, 0), HALVES)
        or _mask_dimensions(call)
        or _odd_widths(call, 8)
        or (f"heads of {widest}, more than 128" if widest > 128 else None)
        or ("a single key" if call.keys == 1 else None)
        or _shape(call, grouped=call.grouped)
    )


def _not_by_xformers(call: AttentionCall) -> str | None:
    halves = HALVES if (call.capability or (0, 0)) >= (8, 0) else HALVES[:1]
    return (
        _card(call, (6, 0), ("float32", *halves))
        or _dropout(call)
        or _mask_dimensions(call)
        or ("a mask beside causality" if call.causal and call.mask != "none" else None)
        or _odd_widths(call, 8 if call.dtype in HALVES else 4)
        # masks with other strides are copied for it
        or _shape(call._replace(mask_in_rows=True), grouped=False, dimensions=4)
    )


def _not_by_sage(call: AttentionCall) -> str | None:
    return (
        _card(call, (8, 0), HALVES)
        or (f"compute capability {_version(call)}" if call.capability not in SAGE_CARDS else None)
        or _dropout(call)
        or ("a mask" if call.mask != "none" else None)
        or _unequal_widths(call)
        or (f"heads of {call.width}, more than 128" if call.width > 128 else None)
        or _uneven_causality(call)
        or _shape(call, grouped=call.grouped, dimensions=4)
    )


def _card(call: AttentionCall, least: tuple[int, int], dtypes: tuple[str, ...]) -> str | None:
    if call.device != "cuda":
        return f"tensors on the {call.device.upper()}"
    if (call.capability or (0, 0)) < least:
        return f"compute capability {_version(call)}, less than {least[0]}.{least[1]}"
    return call.dtype if call.dtype not in dtypes else None


def _version(call: AttentionCall) -> str:
    return ".".join(map(str, call.capability or ("unknown",)))


def _dropout(call: AttentionCall) -> str | None:
    return f"dropout of {call.dropout}" if call.dropout > 0 else None


def _mask_dimensions(call: AttentionCall) -> str | None:
    known = call.mask == "none" or call.mask_dimensions in (2, 4) or call.mask_dimensions == call.dimensions == 3
    return None if known else f"a mask of {call.mask_dimensions} dimensions"


def _unequal_widths(call: AttentionCall) -> str | None:
    return f"heads of {call.width} with values of {call.value_width}" if call.width != call.value_width else None


def _odd_widths(call: AttentionCall, step: int) -> str | None:
    odd = [width for width in (call.width, call.value_width) if width == 0 or width % step]
    return f"heads of {odd[0]}, no multiple of {step}" if odd else None


def _uneven_causality(call: AttentionCall) -> str | None:
    uneven = call.causal and call.queries != call.keys
    return f"causality of {call.queries} queries and {call.keys} keys" if uneven else None


def _shape(call: AttentionCall, *, grouped: bool, dimensions: int = LEAST_DIMENSIONS) -> str | None:
    """What no fused kernel supports; unless heads are `grouped`, queries, keys and values must have as many.

    `dimensions`: the fewest that are supported.
    """
    others = (call.key_heads, call.value_heads)
    fits = others == (call.heads, call.heads) or (grouped and all(call.heads % (other or 1) == 0 for other in others))
    spread = not call.in_rows or (call.device == "cuda" and not call.mask_in_rows)
    faults = (
        (not dimensions <= call.dimensions <= 4, f"{call.dimensions} dimensions"),
        (not call.items_match, "batches of different sizes"),
        (not call.widths_match, "heads of queries and keys of different widths"),
        (spread, "rows that are spread out in memory"),
        (min(call.queries, call.keys) == 0, "empty sequences"),
        (not fits, f"{call.heads} heads of queries for {others[0]} of keys and {others[1]} of values"),
    )
    return next((said for found, said in faults if found), None)


@dataclass(frozen=True)
class AttentionBackend:
    """A way to compute attention that a plan can name."""

    title: str
    unsupported: Callable[[AttentionCall], str | None]  # what it does not support of a call, in words; None: it does
    package: str | None = None  # import name of the package that it needs
    technique: str | None = None  # lossy technique that it is; None: its numbers are torch's, but for rounding
    whole_scores: bool = False  # whether it computes the whole matrix of scores at once


BACKENDS: Mapping[str, AttentionBackend] = {
    "flash": AttentionBackend("torch's flash attention", _not_by_flash),
    "efficient": AttentionBackend("torch's memory-efficient attention", _not_by_efficient),
    "cudnn": AttentionBackend("cuDNN's attention", _not_by_cudnn),
    "math": AttentionBackend("torch's path of plain products", lambda call: None, whole_scores=True),
    "xformers": AttentionBackend("xFormers' attention", _not_by_xformers, package="xformers"),
    "sage": AttentionBackend("SageAttention", _not_by_sage, package="sageattention", technique="sage-attention"),
    "chunked": AttentionBackend("chunked attention", _dropout),
}
ATTENTION_NAMES = ("auto", "torch", *BACKENDS)
