"""A logged call → the same passes on a simulated card, each beside as much as waited there when it began."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.measure.call_log import LoggedPass, PassLog

__all__ = ["Repeater"]


class Repeater:
    """Repeats passes of `components`, which have no weights, on `device`.

    In place of what is `unable` (components with a method, or with the path of a part) to work on shapes, its parts
    are repeated one after another.
    """

    def __init__(
        self, components: Mapping[str, nn.Module], device: torch.device, unable: Collection[tuple[str, str]]
    ) -> None:
        self._components, self._device = components, device
        self._doing: list[LoggedPass] = []  # the innermost last
        for name, method in unable:
            self._take_apart(name, method)

    def _take_apart(self, name: str, method: str) -> None:
        """From now on the parts of what `method` of the component `name` calls are repeated instead."""
        target = self._components[name]
        if method not in ("forward", "encode", "decode"):
            target, method = target.get_submodule(method), "forward"
        setattr(target, method, self._parts)

    def _parts(self, *args: Any, **kwargs: Any) -> None:
        for part in self._doing[-1].parts:
            self.repeat(part)

    def repeat(self, done: LoggedPass) -> None:
        args, kwargs = done.given(self._device)
        here = sum(each.nbytes for each in tree_leaves((args, kwargs)) if _is_on(each, self._device))
        waiting = torch.zeros(max(done.waiting - here, 0), dtype=torch.uint8, device=self._device)
        self._doing.append(done)
        try:
            done.of(self._components)(*args, **kwargs)
        finally:
            self._doing.pop()
            del waiting

    def find_unable(self, log: PassLog) -> set[tuple[str, str]]:
        """What of `log` cannot be repeated on shapes; whatever is tried stays in use, so this is for once only."""
        unable: set[tuple[str, str]] = set()

        def attempt(done: LoggedPass) -> None:
            if (done.component, done.method) not in unable:
                try:
                    return self.repeat(done)
                except Exception:  # of anybody's code
                    unable.add((done.component, done.method))
            for part in done.parts:
                attempt(part)
            return None

        for done in log.passes:
            attempt(done)
        return unable


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device
