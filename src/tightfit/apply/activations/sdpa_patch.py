"""Patches of the two functions that compute attention, in place while any component runs.

They are torch's `scaled_dot_product_attention`, and `get_attention_scores` of diffusers' two attention classes, which
the older processors call (plain, sliced and IP-Adapter ones without "2_0" in their names). No module is changed: a call
goes to the component that runs in its own thread, or to the original function if there is none.

Two alternatives were rejected. A torch function mode patches nothing, but takes 2 µs from each of the thousands of
operations of a step. Setting processors misses modules without one (autoencoders, text encoders) and a user's own.

Compiled blocks detect the patch and are recompiled for it once. They then call a custom operator, which looks up the
component at run time, so that graphs stay whole. Older processors in compiled code compute their scores as usual.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from tightfit.apply.activations.chunked_attention import Scores

__all__ = ["AttentionHandler", "Settings", "attend_by_torch", "current_handlers", "set_handlers", "use_handler"]


class Settings(NamedTuple):
    """Arguments of `scaled_dot_product_attention` after query, key and value, in its order."""

    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False


class AttentionHandler(Protocol):
    """Takes the attention calls of a running component."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
    ) -> torch.Tensor: ...

    def spares_scores(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether to avoid the scores of `query` and `key`, of shape (items × heads, positions, width)."""
        ...


@contextlib.contextmanager
def use_handler(who: AttentionHandler) -> Iterator[None]:
    """Route this thread's attention calls to `who`. Components may be nested: the innermost takes the calls."""
    stack = _stack()
    stack.append(who)
    try:
        _replacement.settle()
        yield
    finally:
        if stack:
            stack.pop()
        _replacement.settle()


def current_handlers() -> tuple[AttentionHandler, ...]:
    """Return the handlers of this thread's attention calls, the innermost last."""
    return tuple(_stack())


def set_handlers(who: Sequence[AttentionHandler]) -> None:
    """Leave only `who` as this thread's handlers, even if an interruption kept others from being removed."""
    _stack()[:] = who
    _replacement.settle()


def attend_by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return attention computed by the function that was there before the patch."""
    mask, dropout, causal, scale, grouped = settings
    return _replacement.before(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)


class _Replacement:
    """Patches the functions while any component runs, in whatever thread."""

    def __init__(self) -> None:
        self.before: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
        self.stacks: dict[int, list[AttentionHandler]] = {}  # attention handlers by thread id
        self._lock = threading.Lock()
        self._changed: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []  # owner, name, old, new

    def settle(self) -> None:
        with self._lock:
            working = any(list(self.stacks.values()))  # other threads may add handlers meanwhile
            if working and not self._changed:
                self.before = F.scaled_dot_product_attention  # torch's own, or another library's patch
                self._replace(F, "scaled_dot_product_attention", _attention)
                for owner in (Attention, AttentionModuleMixin):
                    self._replace(owner, "get_attention_scores", _sparing(owner.get_attention_scores))
            elif not working:  # safe to repeat after an interruption
                for owner, name, old, new in self._changed:
                    if vars(owner)[name] is new:  # otherwise another library has patched it since
                        setattr(owner, name, old)
                self._changed.clear()

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self._changed.append((owner, name, vars(owner)[name], new))
        setattr(owner, name, new)


_replacement = _Replacement()


def _stack() -> list[AttentionHandler]:
    """This thread's attention handlers, the innermost last."""
    return _replacement.stacks.setdefault(threading.get_ident(), [])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replacement of `scaled_dot_product_attention`."""
    parts, settings = (query, key, value), Settings(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if torch.compiler.is_compiling():
        # is_exporting() itself is true for everything that torch 2.11 compiles (torch/_dynamo/variables/torch.py)
        if torch.compiler._is_exporting_flag or _learns(*parts, attn_mask):
            return attend_by_torch(*parts, settings)
        compiled: torch.Tensor = _compiled_attention(*parts, *settings)
        return compiled
    if has_torch_function(parts):  # a tensor subclass, or a function mode that looks for this function
        result: torch.Tensor = handle_torch_function(_attention, parts, *parts, *settings)  # type: ignore[arg-type]
        return result
    return _route(*parts, settings)


def _route(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    stack = _stack()
    if stack and not _is_for_torch(query, key, value, settings.mask):
        return stack[-1].attend(query, key, value, settings)
    return attend_by_torch(query, key, value, settings)


@torch.library.custom_op("tightfit::attention", mutates_args=())
def _compiled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention as compiled graphs call it; the result is contiguous, whichever implementation computes it."""
    settings = Settings(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _route(query, key, value, settings).contiguous()


@_compiled_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *settings: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _sparing(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the replacement of `get_attention_scores`."""

    @functools.wraps(original)
    def get_attention_scores(
        attn: Any, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        stack = [] if torch.compiler.is_compiling() else _stack()
        if not stack or _is_for_torch(query, key, attention_mask) or not stack[-1].spares_scores(query, key):
            return original(attn, query, key, attention_mask)

        def attend(value: torch.Tensor) -> torch.Tensor:
            dtype = torch.float32 if attn.upcast_attention else query.dtype
            queries, keys, values = (part.to(dtype)[None] for part in (query, key, value))  # as the heads of one item
            mask = None if attention_mask is None else attention_mask.to(dtype)[None]
            return stack[-1].attend(queries, keys, values, Settings(mask, scale=attn.scale))[0].to(value.dtype)

        shape = (*query.shape[:-1], key.shape[-2])
        return Scores.promise(shape, query, lambda: original(attn, query, key, attention_mask), attend)

    return get_attention_scores


def _is_for_torch(*tensors: torch.Tensor | None) -> bool:
    """Whether only torch can compute it: nested tensors, meta tensors, autocast, gradients."""
    query = tensors[0]
    assert query is not None
    unusual = query.is_nested or query.is_meta
    return unusual or torch.is_autocast_enabled(query.device.type) or _learns(*tensors)


def _learns(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
