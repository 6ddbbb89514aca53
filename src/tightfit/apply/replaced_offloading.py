"""Take diffusers' and accelerate's own offloading and device maps off a pipeline, and put them back.

Hooks of single layers and of groups of layers refer to weights, which may be others by the time of `undo()`. So what is
put back are new ones with the same settings, by the public functions of the two libraries. Other hooks are put back as
they were.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from torch import nn

from tightfit.measure.modules import find_components

__all__ = [
    "group_offloading",
    "is_replaceable",
    "moving_parts",
    "offloading_device",
    "own_device_map",
    "put_back",
    "replaced",
    "replaced_names",
]

_GROUP_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
_NOT_ARGUMENTS = {"stream", "module_prefix"}  # of diffusers' configuration; the others are, by the same names

_OWN = ("_all_hooks", "hf_device_map")  # attributes of a pipeline; diffusers registers the hooks again after each call
_MOVES = ("to", "cuda")  # methods that accelerate puts in front of a module's own where its device map forbids them

PutBack = Callable[[nn.Module], Any]


class TakenOff:
    """The offloading that was taken off a pipeline. It does not keep the pipeline alive."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of components
        self._parts: list[tuple[weakref.ref[nn.Module], PutBack]] = []
        self._own: dict[str, Any] = {}  # attributes of the pipeline

    def take_off(self, pipe: Any) -> None:
        """Take the offloading off `pipe`, which is replaceable; nothing if that was done already."""
        for name, module in find_components(pipe).items():
            if taken := _take_off_groups(module) or _take_off_hooks(module):
                self.names.append(name)
                self._parts.append((weakref.ref(module), taken))
        for name in () if isinstance(pipe, nn.Module) else _OWN:
            if value := vars(pipe).get(name):
                self._own[name] = value
                setattr(pipe, name, [] if isinstance(value, list) else None)

    def put_back(self, pipe: Any) -> None:
        """Offload `pipe` as before."""
        for reference, register in self._parts:
            if (module := reference()) is not None:
                register(module)
        for name, value in self._own.items():
            setattr(pipe, name, value)


_taken: weakref.WeakKeyDictionary[Any, TakenOff] = weakref.WeakKeyDictionary()


@contextmanager
def replaced(pipe: Any) -> Iterator[None]:
    """Take offloading off `pipe`, which is replaceable; put it back after an error."""
    try:
        _taken.setdefault(pipe, TakenOff()).take_off(pipe)
        yield
    except BaseException:
        put_back(pipe)
        raise


def replaced_names(pipe: Any) -> list[str]:
    """Return the names of the components of `pipe` whose offloading is replaced."""
    return _taken[pipe].names if pipe in _taken else []


def put_back(pipe: Any) -> None:
    """Offload `pipe` again as before it was `replaced`; nothing if it was not, or is None."""
    if pipe is not None and (taken := _taken.pop(pipe, None)) is not None:
        taken.put_back(pipe)


def offloading_device(pipe: Any) -> torch.device | None:
    """Return the card to which weights of `pipe` are moved, or on which they are by its device map; None if several."""
    whole = own_device_map(pipe)
    named: set[Any] = set(whole.values()) if isinstance(whole, dict) else {whole}
    for module in find_components(pipe).values():
        if (config := group_offloading(module)) is not None:
            named.add(config.onload_device)
        named |= {hook.execution_device for part in moving_parts(module) for hook in _hooks(part)}
    cards = {device for device in map(_device, named) if device is not None and device.type == "cuda"}
    return cards.pop() if len(cards) == 1 else None


def own_device_map(pipe: Any) -> Any:
    """Return the device map that diffusers gave to `pipe`; None without one. A plan's own is no attribute."""
    return None if isinstance(pipe, nn.Module) else getattr(pipe, "__dict__", {}).get("hf_device_map")


def _device(named: Any) -> torch.device | None:
    """The device of that name or number; None where there is none, as for "disk"."""
    try:
        return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    except (RuntimeError, TypeError):
        return None


def is_replaceable(module: nn.Module) -> bool:
    """Whether what moves weights of `module` is one known kind, and has all of them in host memory."""
    configs, parts = _group_configs(module), moving_parts(module)
    if configs:
        first = configs[0]
        one = all(dataclasses.replace(each, module_prefix=first.module_prefix) == first for each in configs)
        in_memory = first.offload_to_disk_path is None and torch.device(first.offload_device).type == "cpu"
        return one and in_memory and not parts
    hooks = [hook for part in parts for hook in _hooks(part)]
    if any(type(hook) is CpuOffload for hook in hooks):
        return len(hooks) == 1 and parts == [module]
    return all(type(hook) is AlignDevicesHook for hook in hooks) and all(map(_is_in_memory, _offloading(hooks)))


def moving_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts of `module` with hooks of accelerate's that move weights or inputs."""
    kinds = (AlignDevicesHook, CpuOffload)
    return [part for part in module.modules() if any(isinstance(hook, kinds) for hook in _hooks(part))]


def group_offloading(module: nn.Module) -> Any:
    """Return the GroupOffloadingConfig with which diffusers offloads groups of layers of `module`, or None."""
    return next(iter(_group_configs(module)), None)


def _group_configs(module: nn.Module) -> list[Any]:
    hooks = [getattr(getattr(part, "_diffusers_hook", None), "hooks", {}) for part in module.modules()]
    return [each[_GROUP_HOOKS[0]].config for each in hooks if _GROUP_HOOKS[0] in each]


def _take_off_groups(module: nn.Module) -> PutBack | None:
    config = group_offloading(module)
    if config is None:
        return None
    for part in module.modules():
        if (registry := getattr(part, "_diffusers_hook", None)) is not None:
            for hook in _GROUP_HOOKS:
                registry.remove_hook(hook, recurse=False)
            if not registry.hooks:
                del part._diffusers_hook
            _drop_own_forward(part)
    arguments = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
    return lambda module: apply_group_offloading(module, **arguments, use_stream=config.stream is not None)


def _take_off_hooks(module: nn.Module) -> PutBack | None:
    parts = moving_parts(module)
    hooks = [hook for part in parts for hook in _hooks(part)]
    known = [
        (weakref.ref(part), part._hf_hook, {name: vars(part)[name] for name in _MOVES if name in vars(part)})
        for part in parts
    ]
    for part in parts:
        remove_hook_from_module(part)
        _drop_own_forward(part)
    if layers := _offloading(hooks):
        _tie(module)
        device, buffers = layers[0].execution_device, any(hook.offload_buffers for hook in layers)
        return lambda module: accelerate.cpu_offload(module, device, offload_buffers=buffers)
    if any(type(hook) is CpuOffload for hook in hooks):
        module.to("cpu")  # the last one that ran is on the card
    return (lambda _: _hook_again(known)) if known else None


def _hook_again(known: list[tuple[weakref.ref[nn.Module], Any, dict[str, Any]]]) -> None:
    """Register the hooks of parts again, with the methods that went with them."""
    for reference, hook, methods in known:
        if (part := reference()) is not None:
            add_hook_to_module(part, hook)
            vars(part).update(methods)


def _drop_own_forward(part: nn.Module) -> None:
    """Drop the attribute in which removed hooks leave the class's method: what refers to its module is not copied."""
    if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
        del part.forward


def _hooks(part: nn.Module) -> list[Any]:
    """Return accelerate's hooks of `part`; one may be a list of others."""
    hook = getattr(part, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _offloading(hooks: list[Any]) -> list[Any]:
    return [hook for hook in hooks if getattr(hook, "offload", False)]


def _is_in_memory(hook: AlignDevicesHook) -> bool:
    """Whether the weights that `hook` brings are in a dictionary, not in files."""
    weights = hook.weights_map
    return isinstance(getattr(weights, "dataset", weights), dict)


def _tie(module: nn.Module) -> None:
    """Make parameters one again that share memory: accelerate makes one of each name."""
    known: dict[tuple[Any, ...], nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.numel():
                key = (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
                part._parameters[name] = known.setdefault(key, parameter)
