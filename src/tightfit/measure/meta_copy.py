"""A live pipeline or module → a copy without weights for the simulated card; the original is not changed.

Everything is copied, but large tensors become shapes on torch's "meta" device, which has no memory.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from torch import nn
from transformers import PreTrainedTokenizerBase

from tightfit.errors import PlanError
from tightfit.measure.build_models import LARGE
from tightfit.measure.modules import HANDLE, find_components, weight_tensors

__all__ = ["PROMPT", "fingerprint", "meta_copy", "without_hooks"]

PROMPT = "a prompt"  # the prompt of simulated calls


def meta_copy(pipe: Any) -> Any:
    """Return a copy of `pipe`, a diffusers pipeline or a module, without weights.

    A safety checker is left out: it needs image values. PlanError for weights in a third-party format (a tensor
    subclass), whose shapes alone do not determine memory and work, and for a component that follows a plan.
    """
    known: dict[int, Any] = {}
    for name, module in find_components(pipe).items():
        if hasattr(module, HANDLE):
            raise PlanError(f"{name} follows a plan and cannot be measured: undo() first", name=name)
        for tensor in weight_tensors(module):
            known[id(tensor)] = _meta_tensor(name, tensor)
        for part in module.modules():  # tensors that hooks compute from weights before each call
            computed = [each for each in vars(part).values() if isinstance(each, torch.Tensor) and each.grad_fn]
            known |= {id(tensor): _meta_tensor(name, tensor) for tensor in computed}
    return copy.deepcopy(pipe, known) if isinstance(pipe, nn.Module) else _copy_pipeline(pipe, known)


def _copy_pipeline(pipe: Any, known: dict[int, Any]) -> Any:
    """Copy `pipe` and its parts, with `known` replacements by id; nested pipelines, too."""
    double = copy.copy(pipe)
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            setattr(double, name, None if "safety" in name else copy.deepcopy(part, known))
        elif hasattr(part, "step"):  # a scheduler, whose step counter changes
            setattr(double, name, copy.deepcopy(part, known))
    for name, inner in vars(pipe).items():
        if isinstance(inner, DiffusionPipeline):
            setattr(double, name, _copy_pipeline(inner, known))
    return double


def without_hooks(double: Any) -> Any:
    """Remove all hooks from the modules of `double`, except those of libraries, and return it."""
    for module in find_components(double).values():
        for part in module.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                for key, hook in tuple(hooks.items()):
                    if str(getattr(hook, "__module__", type(hook).__module__)).partition(".")[0] not in _LIBRARIES:
                        del hooks[key]
    return double


def fingerprint(pipe: Any) -> str:
    """A digest of everything that a live pipeline's work depends on; "" where that cannot be determined.

    It can where all code is from libraries with known versions: no third-party classes, no hooks.
    """
    facts = list(_facts("", pipe, set()))
    return "" if None in facts else hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()


_LIBRARIES = {"PIL", "builtins", "collections", "diffusers", "numpy", "tokenizers", "torch", "transformers"}
_LIBRARIES.add("tightfit")  # stand-ins; cached answers are stored with the digest of this code
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
# ignored in configurations: origin, version that saved it, and an unordered list
_NOTES = {"_name_or_path", "_diffusers_version", "_use_default_values"}
# ignored state left by calls: transformers' inactive hooks, diffusers' empty registry, a cache
_LEFT = {"_forward_hooks", "_output_capturing_hooks_installed", "_diffusers_hook"}
_LEFT |= {f"{half}_{name}" for half in ("", "_enc") for name in ("conv_num", "conv_idx", "feat_map")}


def _facts(path: str, value: Any, seen: set[int]) -> Iterator[str | None]:
    """Yield everything inside `value`, one line each; None for what cannot be determined."""
    if isinstance(value, _PLAIN):
        yield f"{path}={value!r}"
    elif isinstance(value, torch.Tensor):
        yield f"{path}:{type(value).__name__}{tuple(value.shape)}{value.stride()}{value.dtype}"
    elif id(value) in seen:
        yield f"{path}:again"
    elif isinstance(value, PreTrainedTokenizerBase):  # only its result for the prompt matters, not the whole vocabulary
        yield f"{path}:{type(value).__qualname__} {value.model_max_length} {value.tokenize(PROMPT)}"
    elif isinstance(value, FunctionType | MethodType | partial) or _store(value) not in _LIBRARIES:
        yield None
    else:
        seen.add(id(value))
        yield f"{path}:{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, nn.Module) and _has_foreign_hooks(value):
            yield None
        for name, item in _items(value):
            if name not in _NOTES | _LEFT:
                yield from _facts(f"{path}.{name}", item, seen)


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether hooks other than transformers' output capturing, or another forward method, are set."""
    own = vars(module)
    hooks = [getattr(hook, "__module__", None) for hook in own["_forward_hooks"].values()]
    registry = own.get("_diffusers_hook")
    others = own["_forward_pre_hooks"] or "forward" in own or (registry is not None and registry.hooks)
    return bool(others) or any(store != "transformers.utils.output_capturing" for store in hooks)


def _store(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    if isinstance(value, SchedulerMixin | DiffusionPipeline):  # other private attributes belong to a call
        yield "config", value.config  # the object itself: the id of a temporary could be reused
        parts = vars(value) if isinstance(value, DiffusionPipeline) else {}
        yield from ((name, part) for name, part in parts.items() if not name.startswith("_"))
    else:
        yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _meta_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        kind = type(plain).__name__
        raise PlanError(f"{name} has weights of type {kind}, whose shapes alone say too little", name=name, kind=kind)
    shape = (
        torch.empty_like(plain, device="meta") if plain.numel() > LARGE or plain.is_meta else plain.to("cpu", copy=True)
    )
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
