"""Dispatch of a component's attention calls: torch, one of its SDPA backends, chunked attention or a package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch

from tightfit.apply.activations.attention_backends import attend_by, installed_backends, is_refusal
from tightfit.apply.activations.sdpa_patch import Settings, use_handler
from tightfit.devices.device import Device
from tightfit.plan.kernel_choice import choose, score_chunk_bytes
from tightfit.schema.attention import BACKENDS, AttentionCall, check_attention

__all__ = ["AttentionDispatcher"]


class AttentionDispatcher:
    """Run each attention call of one component by a suitable backend.

    `wanted` is one of `schema.attention.ATTENTION_NAMES`; PlanError for others. `tell` is called with a sentence for
    each call that the wanted backend (with "auto": torch's own choice) does not run; equal calls get the same sentence.
    At most `block` bytes of scores are computed at once (default: depends on the device). Calls that need gradients or
    run under autocast go to torch and are not counted.
    """

    def __init__(
        self, wanted: str, device: Device, tell: Callable[[str], None] = lambda _: None, *, block: int | None = None
    ) -> None:
        self.calls: Counter[str] = Counter()  # calls so far, by backend
        self._wanted = check_attention(wanted)
        self._usual = "torch" if wanted == "auto" else wanted
        self._kind, self._capability = _kind_of(device)
        self._flash = device.has_flash()
        self._block = block or score_chunk_bytes(self._kind)
        self._installed = installed_backends()
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
            result = attend_by(name, query, key, value, settings, block=self._block)
        except Exception as error:
            if not is_refusal(name, error):
                raise
            self._tell(f"{name} refused a call of {tuple(query.shape)}, unexpectedly: {str(error).splitlines()[0]}")
            name = choose(self._describe(query, key, value, settings), block=self._block).name
            result = attend_by(name, query, key, value, settings, block=self._block)
        self.calls[name] += 1
        return result

    def spares_scores(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether to avoid computing the scores of `query` and `key`, although the caller asks for them."""
        if self._wanted != "auto":
            return self._wanted != "torch" and not BACKENDS[self._wanted].whole_scores
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
