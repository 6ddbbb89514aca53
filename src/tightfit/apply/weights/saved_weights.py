"""`save_pretrained` of a network that follows a plan: each weight is there when its shard is written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tightfit.apply.weights.offloaded_parameter import OffloadedParameter
from tightfit.apply.weights.quantized_tensor import StoredWeight

__all__ = ["saving_members"]

_saving: ContextVar[bool] = ContextVar("saving", default=False)
# of a tensor, without its values; all properties, such as its shape, are, too
_WITHOUT_VALUES = {"untyped_storage", "storage", "numel", "nelement", "dim", "size", "stride", "element_size"}


class WeightToSave(torch.Tensor):
    """A weight on "meta", as libraries plan shards by; all that needs its values gets them, on the CPU."""

    weight: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> WeightToSave:
        shape_only = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
        made: WeightToSave = torch.Tensor._make_subclass(cls, shape_only)
        made.weight = weight
        return made

    def __init__(self, weight: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ not in {"__get__", *_WITHOUT_VALUES}:
            args, kwargs = tree_map_only(WeightToSave, lambda each: each.load(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def load(self) -> torch.Tensor:
        weight = self.weight
        with torch.no_grad():
            value = weight.lazy_weight.value(weight.device) if isinstance(weight, OffloadedParameter) else weight
            return (value.widen() if isinstance(value, StoredWeight) else value.detach()).to("cpu")


def saving_members(original: type) -> dict[str, Any]:
    """Return what overrides members of the class `original`, of a library's network, while it follows a plan.

    The library plans shards by sizes alone and then takes one shard's tensors after another. So the weights of a group,
    which share their memory, may be in several shards, and of weights in files, one shard is in memory
    (`max_shard_size`). A weight with several names is saved under the first, one stored in eight bits as it computes.
    """
    own: Any = original

    @functools.wraps(own.save_pretrained)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _saving.set(True)
        try:
            return own.save_pretrained(self, *args, **kwargs)
        finally:
            _saving.reset(token)

    @functools.wraps(own.state_dict)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own.state_dict(self, *args, **kwargs)
        return _to_save(found) if _saving.get() else found

    return {"save_pretrained": save_pretrained, "state_dict": state_dict}


def _to_save(state: Mapping[str, Any]) -> dict[str, Any]:
    kept, seen = {}, set()
    for name, value in state.items():
        match value:
            case OffloadedParameter():
                which: Any = id(value.lazy_weight)
            case StoredWeight():
                which = name
            case torch.Tensor() if _is_part(value):
                which = value.data_ptr(), value.shape, value.stride()
            case _:
                kept[name] = value
                continue
        if which not in seen:
            kept[name] = WeightToSave(value)
        seen.add(which)
    return kept


def _is_part(value: torch.Tensor) -> bool:
    """Whether `value` shares its memory with others, as the weights of a group do: libraries would not part them."""
    return value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
