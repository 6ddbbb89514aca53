"""Dispatch of a component's attention calls: torch, one of its SDPA backends, chunked attention or a package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.apply.activations.attention_packages import PACKAGES, attend_by_package
from tightfit.apply.activations.chunked_attention import chunked_attention
from tightfit.apply.activations.sdpa_patch import Settings, attend_by_torch, use_handler
from tightfit.catalog.attention import AttentionCall
from tightfit.devices.device import Device
from tightfit.plan.kernel_choice import check_wanted, choose, score_chunk_bytes

__all__ = ["AttentionDispatcher"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NOT_TAKEN = (ImportError, NotImplementedError, ValueError, AssertionError)  # raised by packages for unsupported calls


class AttentionDispatcher:
    """Run each attention call of one component by a suitable implementation.

    `wanted` is "auto" or a name of `schema.plan.Attention`; PlanError for others. `tell` is called with a sentence for
    each call that the wanted implementation (with "auto": torch's own choice) does not run; equal calls get the same
    sentence. At most `block` bytes of scores are computed at once (default: depends on the device). Calls that need
    gradients or run under autocast go to torch and are not counted.
    """

    def __init__(
        self, wanted: str, device: Device, tell: Callable[[str], None] = lambda _: None, *, block: int | None = None
    ) -> None:
        self.calls: Counter[str] = Counter()  # calls so far, by implementation
        self._wanted = check_wanted(wanted)
        self._usual = "torch" if wanted == "auto" else wanted
        self._kind, self._capability = _kind_of(device)
        self._flash = device.has_flash()
        self._block = block or score_chunk_bytes(self._kind)
        self._installed = {name for name, package in PACKAGES.items() if find_spec(package) is not None}
        self._tell = tell
        self._choices: dict[Hashable, tuple[str, str | None]] = {}  # implementation and message, by call signature

    def working(self) -> AbstractContextManager[None]:
        """Return a context manager that routes this thread's attention calls to this dispatcher."""
        return use_handler(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
        """Return `scaled_dot_product_attention` by the chosen implementation; if that refuses, by that of "auto"."""
        name, said = self._choose(query, key, value, settings)
        if said is not None:
            self._tell(said)
        try:
            result = self._run(name, query, key, value, settings)
        except (*_NOT_TAKEN, RuntimeError) as error:
            if not _is_refusal(name, error):
                raise
            self._tell(f"{name} refused a call of {tuple(query.shape)}, unexpectedly: {str(error).splitlines()[0]}")
            name = choose(self._describe(query, key, value, settings), block=self._block).name
            result = self._run(name, query, key, value, settings)
        self.calls[name] += 1
        return result

    def spares_scores(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether to avoid computing the scores of `query` and `key`, although the caller asks for them."""
        if self._wanted != "auto":
            return self._wanted not in ("torch", "math")
        call = self._describe(query, key, query, Settings())._replace(dimensions=2)  # 2: no fused kernel takes it
        return choose(call, block=self._block).name != "torch"  # torch would compute the whole matrix

    def _choose(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
    ) -> tuple[str, str | None]:
        mask, *others = settings
        parts = (query, key, value) if mask is None else (query, key, value, mask)
        learns = mask is not None and mask.requires_grad
        alike = (*((part.shape, part.stride(), part.dtype) for part in parts), learns, query.device, *others)
        if alike not in self._choices:  # looked up for every call: cheaper than describing it
            call = self._describe(query, key, value, settings)
            name, because = choose(call, self._wanted, self._installed, self._block)
            said = f"{name} for {call.queries} queries and {call.keys} keys: {because}"
            self._choices[alike] = name, None if name == self._usual else said
        return self._choices[alike]

    def _run(
        self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
    ) -> torch.Tensor:
        if name == "torch":
            return attend_by_torch(query, key, value, settings)
        if name == "chunked":
            return chunked_attention(query, key, value, *settings, block=self._block)
        if name in PACKAGES:
            return attend_by_package(name, query, key, value, settings)
        with sdpa_kernel(_BACKENDS[name]):
            return attend_by_torch(query, key, value, settings)

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


def _is_refusal(name: str, error: Exception) -> bool:
    """Whether `error` means only that implementation `name` does not support this call."""
    if name in PACKAGES:
        return isinstance(error, _NOT_TAKEN)
    return name in _BACKENDS and "No available kernel" in str(error)
