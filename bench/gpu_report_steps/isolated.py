"""Functions in a process of their own, so that they find the card as no one has used it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

__all__ = ["in_own_process"]


def in_own_process(function: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What `function` of a module returns; its error as "failed", which is a result as well."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        try:
            return processes.submit(function, *given).result()
        except Exception as error:
            return {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
