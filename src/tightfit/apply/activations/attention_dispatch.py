"""Attention calls of a component: the choice of a backend for each, and how each backend computes."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.apply.activations.chunked_attention import chunked_attention
from tightfit.apply.activations.sdpa_patch import Settings, attend_by_torch, use_handler
from tightfit.devices.device import Device
from tightfit.plan.kernel_choice import choose, score_chunk_bytes
from tightfit.schema.attention import BACKENDS, AttentionCall, check_attention

__all__ = ["AttentionDispatcher"]


_REFUSED = (ImportError, NotImplementedError, ValueError, AssertionError)  # raised by packages for unsupported calls

# of queries, keys, values, the other arguments, and the bytes of scores that may exist at once
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Settings, int], torch.Tensor]


def _installed_backends() -> set[str]:
    """Return the backends whose package can be imported."""
    return {name for name, backend in BACKENDS.items() if backend.package and find_spec(backend.package)}


def _is_refusal(name: str, error: Exception) -> bool:
    """Whether `error` means only that the backend `name` does not support a call."""
    if name in BACKENDS and BACKENDS[name].package:
        return isinstance(error, _REFUSED)
    return name in BACKENDS and "No available kernel" in str(error)


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, chunk_bytes: int
) -> torch.Tensor:
    return attend_by_torch(query, key, value, settings)


def _chunked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, chunk_bytes: int
) -> torch.Tensor:
    return chunked_attention(query, key, value, *settings, chunk_bytes=chunk_bytes)


def _by_kernel(kernel: SDPBackend) -> Attend:
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, chunk_bytes: int
    ) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return attend_by_torch(query, key, value, settings)

    return attend


def _by_xformers(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, chunk_bytes: int
) -> torch.Tensor:
    operations: Any = importlib.import_module("xformers.ops")
    bias = operations.LowerTriangularMask() if settings.causal else None
    if settings.mask is not None:
        bias = _bias(settings.mask, query.dtype, key.shape[-2]).expand(*query.shape[:-1], key.shape[-2])
    parts = (part.transpose(1, 2) for part in (query, key, value))  # (items, positions, heads, width)
    result: torch.Tensor = operations.memory_efficient_attention(*parts, attn_bias=bias, p=0.0, scale=settings.scale)
    return result.transpose(1, 2)


def _by_sage(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, chunk_bytes: int
) -> torch.Tensor:
    attend = importlib.import_module("sageattention").sageattn
    said = {"tensor_layout": "HND", "is_causal": settings.causal, "sm_scale": settings.scale}
    result: torch.Tensor = attend(query, key, value, **said)
    return result


def _bias(mask: torch.Tensor, dtype: torch.dtype, keys: int) -> torch.Tensor:
    """`mask` as an additive bias whose rows begin at multiples of 8 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
    mask = mask.to(dtype).expand(*mask.shape[:-1], keys)
    if mask.stride(-1) == 1 and all(step % 8 == 0 for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, 8 - keys % 8))[..., :keys]


_ATTEND: Mapping[str, Attend] = {
    "torch": _by_torch,
    "flash": _by_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": _by_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": _by_kernel(SDPBackend.CUDNN_ATTENTION),
    "math": _by_kernel(SDPBackend.MATH),
    "xformers": _by_xformers,
    "sage": _by_sage,
    "chunked": _chunked,
}


class AttentionDispatcher:
    """Run each attention call of one component by a suitable backend.

    `wanted` is one of `schema.attention.ATTENTION_NAMES`; PlanError for others. `tell` is called with a sentence for
    each call that the wanted backend (with "auto": torch's own choice) does not run; equal calls get the same sentence.
    At most `chunk_bytes` of scores are computed at once (default: depends on the device). Calls that need gradients or
    run under autocast go to torch and are not counted.
    """

    def __init__(
        self,
        wanted: str,
        device: Device,
        tell: Callable[[str], None] = lambda _: None,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        self.calls: Counter[str] = Counter()  # calls so far, by backend
        self._wanted = check_attention(wanted)
        self._usual = "torch" if wanted == "auto" else wanted
        self._kind, self._capability = _kind_of(device)
        self._flash = device.has_flash()
        self._chunk_bytes = chunk_bytes or score_chunk_bytes(self._kind)
        self._installed = _installed_backends()
        self._tell = tell
        self._choices: dict[Hashable, tuple[str, str | None]] = {}  # backend and message, by call signature

    def working(self) -> AbstractContextManager[None]:
        """Return a context manager that routes this thread's attention calls to this dispatcher."""
        return use_handler(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
        """Return `scaled_dot_product_attention` by the chosen backend; if that refuses, by that of "auto"."""
        name, said = self._choose(query, key, value, settings)
        if said is not None:
            self._tell(said)
        try:
            result = _ATTEND[name](query, key, value, settings, self._chunk_bytes)
        except Exception as error:
            if not _is_refusal(name, error):
                raise
            self._tell(f"{name} refused a call of {tuple(query.shape)}, unexpectedly: {str(error).splitlines()[0]}")
            name = choose(self._describe(query, key, value, settings), chunk_bytes=self._chunk_bytes).name
            result = _ATTEND[name](query, key, value, settings, self._chunk_bytes)
        self.calls[name] += 1
        return result

    def spares_scores(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether to avoid computing the scores of `query` and `key`, although the caller asks for them."""
        if self._wanted != "auto":
            return self._wanted != "torch" and not BACKENDS[self._wanted].whole_scores
        call = self._describe(query, key, query, Settings())._replace(dimensions=2)  # 2: no fused kernel takes it
        return choose(call, chunk_bytes=self._chunk_bytes).name != "torch"  # torch would compute the whole matrix

    def _choose(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
    ) -> tuple[str, str | None]:
        mask, *others = settings
        parts = (query, key, value) if mask is None else (query, key, value, mask)
        learns = mask is not None and mask.requires_grad
        alike = (*((part.shape, part.stride(), part.dtype) for part in parts), learns, query.device, *others)
        if alike not in self._choices:  # looked up for every call: cheaper than describing it
            call = self._describe(query, key, value, settings)
            name, because = choose(call, self._wanted, self._installed, self._chunk_bytes)
            said = f"{name} for {call.queries} queries and {call.keys} keys: {because}"
            self._choices[alike] = name, None if name == self._usual else said
        return self._choices[alike]

    def _describe(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
    ) -> AttentionCall:
        on_cpu = query.device.type == "cpu"
        return AttentionCall.of(
            query,
            key,
            value,
            settings.mask,
            device="cpu" if on_cpu else self._kind,
            capability=None if on_cpu else self._capability,
            causal=settings.causal,
            grouped=settings.grouped,
            dropout=settings.dropout,
            flash=self._flash,
        )


def _kind_of(device: Device) -> tuple[str, tuple[int, int] | None]:
    """Device type for kernel choice, and compute capability: by default 8.0, with all kernels, for a simulated card."""
    simulated = device.kind == "simulated"
    if device.kind != "cuda" and not (simulated and device.separate):
        return "cpu" if simulated else device.torch_device.type, None
    major, _, minor = (device.compute_capability() or "8.0").partition(".")
    return "cuda", (int(major), int(minor or 0))
