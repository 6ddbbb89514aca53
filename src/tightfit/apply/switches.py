"""What moves, casts and diffusers' own switches for memory do to a pipeline and its components that follow a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tightfit.errors import AlreadyFitted

__all__ = ["module_switches", "pipeline_switches"]

_HOST = torch.device("cpu")


def pipeline_switches(original: type, here: torch.device) -> dict[str, Any]:
    """Return members of a pipeline of the class `original` that runs on `here`: they cast, or refuse by name."""

    def to(self: Any, *args: Any, silence_dtype_warnings: bool = False, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        _check("this pipeline", device, here)
        return self if dtype is None else original.to(self, dtype=dtype, silence_dtype_warnings=True)  # type: ignore[attr-defined]

    return {"to": to, **_refused("this pipeline", original, "offload")}


def module_switches(
    name: str, original: type, home: Callable[[], torch.device], leave: Callable[[], object], *, measured: bool
) -> dict[str, Any]:
    """Return members of the component `name`, of the class `original`, which reports `home()` as its device.

    It is where the plan wants it, so a move to that device or to host memory is none. `leave()` evicts the component,
    so that its source parameters are cast, and brings adapters that were loaded to `home()` to them. `measured`:
    whether its calls are measured beforehand.
    """
    if not hasattr(original, "to"):
        return {}
    cast = original.to

    @functools.wraps(cast)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):
            return cast(self, *args, **kwargs)  # raises for its invalid arguments
        _check(name, device, home(), _HOST)
        leave()
        if device is None:
            return cast(self, *args, **kwargs)
        return self if dtype is None else cast(self, dtype=dtype)

    def cpu(self: nn.Module) -> Any:
        return self.to(_HOST)

    def cuda(self: nn.Module, device: Any = None) -> Any:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    # diffusers' casting hooks keep calling the module that they were made for, also in a copy of it
    unable = ("offload", "layerwise_casting") if measured else ("offload",)
    return {"to": to, "cpu": cpu, "cuda": cuda, **_refused(name, original, *unable)}


def _check(what: str, device: torch.device | None, *homes: torch.device) -> None:
    """Raise AlreadyFitted if `device` is none of the `homes`; without an index, it is any device of its type."""
    if device is None or any(device in (home, torch.device(home.type)) for home in homes):
        return
    raise AlreadyFitted(
        f"{what} follows a plan, which runs it on {homes[0]}: undo() before to({str(device)!r})", device=str(device)
    )


def _refused(what: str, original: type, *switches: str) -> dict[str, Callable[..., None]]:
    """Return members for all methods of `original` that switch on one of `switches`: each raises AlreadyFitted."""
    return {method: _refusal(what, method) for method in _switches(original, switches)}


def _switches(original: type, switches: tuple[str, ...]) -> Iterator[str]:
    for method in dir(original):
        if method.startswith("enable_") and any(switch in method for switch in switches):
            yield method


def _refusal(what: str, method: str) -> Callable[..., None]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AlreadyFitted(
            f"{what} follows a plan, which moves and casts its weights: undo() before {method}()", method=method
        )

    return refused
