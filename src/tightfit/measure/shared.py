"""Modules and weights that components of a pipeline share belong to the first of them: the others only reference them.

`ZImageControlNetModel.from_transformer`, for instance, gives a ControlNet modules of the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

__all__ = ["give_owners"]


def give_owners(components: Iterable[nn.Module], undo: Callable[..., object]) -> None:
    """Until `undo` is closed, register modules and weights that several `components` share in the first of them only.

    In the others, a shared module becomes a plain attribute, and a weight outside such modules a copy. Modules in lists
    and sequences, which need the registration to find them, are not changed.
    """
    owned: set[int] = set()
    weights: set[int] = set()
    for component in components:
        if id(component) in owned:  # the whole component is a module of another one
            continue
        for part in [part for part in component.modules() if id(part) not in owned]:
            if not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                _unregister(part, {name for name, child in part.named_children() if id(child) in owned}, undo)
            _copy(part, weights, undo)
        owned.update(map(id, component.modules()))
        weights.update(map(id, component.parameters()))


def _unregister(part: nn.Module, shared: set[str], undo: Callable[..., object]) -> None:
    if not shared:
        return
    modules = part._modules
    order = list(modules)
    for name in shared:
        vars(part)[name] = modules.pop(name)

    def register() -> None:
        back = {name: vars(part).pop(name) if name in shared else modules.get(name) for name in order}
        modules.clear()
        modules.update(back)

    undo(register)


def _copy(part: nn.Module, weights: set[int], undo: Callable[..., object]) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        if id(parameter) in weights:
            part._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            undo(part._parameters.__setitem__, name, parameter)
