"""A logged call → the same component calls on a simulated card, each with the activations live at its start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.measure.call_log import CallLog, LoggedCall

__all__ = ["Repeater"]


class Repeater:
    """Repeats logged calls of `components`, which have no weights, on `device`.

    `unable` are methods and submodules (component name and method or path) that cannot run on shapes: their submodule
    calls are repeated one after another instead.
    """

    def __init__(
        self, components: Mapping[str, nn.Module], device: torch.device, unable: Collection[tuple[str, str]]
    ) -> None:
        self._components, self._device = components, device
        self._doing: list[LoggedCall] = []  # calls in progress, the innermost last
        for name, method in unable:
            self._take_apart(name, method)

    def _take_apart(self, name: str, method: str) -> None:
        """From now on repeat the submodule calls of `method` of the component `name` instead of the method."""
        target = self._components[name]
        if method not in ("forward", "encode", "decode"):
            target, method = target.get_submodule(method), "forward"
        setattr(target, method, self._parts)

    def _parts(self, *args: Any, **kwargs: Any) -> None:
        for part in self._doing[-1].parts:
            self.repeat(part)

    def repeat(self, done: LoggedCall) -> None:
        args, kwargs = done.given(self._device)
        here = sum(each.nbytes for each in tree_leaves((args, kwargs)) if _is_on(each, self._device))
        waiting = torch.zeros(max(done.waiting - here, 0), dtype=torch.uint8, device=self._device)
        self._doing.append(done)
        try:
            done.of(self._components)(*args, **kwargs)
        finally:
            self._doing.pop()
            del waiting

    def find_unable(self, log: CallLog) -> set[tuple[str, str]]:
        """Return what in `log` cannot be repeated on shapes. Attempts change state, so use an instance only once."""
        unable: set[tuple[str, str]] = set()

        def attempt(done: LoggedCall) -> None:
            if (done.component, done.method) not in unable:
                try:
                    return self.repeat(done)
                except Exception:  # raised by third-party code
                    unable.add((done.component, done.method))
            for part in done.parts:
                attempt(part)
            return None

        for done in log.passes:
            attempt(done)
        return unable


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device
