"""diffusers' attention backend: `set_attention_backend` of one model is for all that the process makes later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from diffusers.models.attention_dispatch import _AttentionBackendRegistry

__all__ = ["own_attention_backend"]


@contextlib.contextmanager
def own_attention_backend() -> Iterator[None]:
    """Put back at the end what it was at the beginning."""
    before = _AttentionBackendRegistry._active_backend
    try:
        yield
    finally:
        _AttentionBackendRegistry._active_backend = before
