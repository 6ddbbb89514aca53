"""Known models and their components → the same pipeline without weights: networks have shapes only.

Networks are built from their configurations, with large tensors on torch's "meta" device, which has no memory.
Tokenizers and processors of known models are replaced (`measure/dummy_tokenizers.py`).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tightfit.catalog.known import KnownComponent, KnownModel
from tightfit.errors import ModelError
from tightfit.measure.dummy_tokenizers import StandInProcessor, StandInTokenizer

__all__ = ["LARGE", "build_known", "build_network", "build_part", "part_class"]

LARGE = 2**14  # elements
HUGE = 2**22  # elements, of a table that a network computes by itself


def build_known(model: KnownModel, dtype: torch.dtype | None = None) -> Any:
    """Return the diffusers pipeline of a known `model`, networks on "meta", in `dtype` (None: as usually loaded)."""
    parts: dict[str, Any] = {name: build_part(name, part, dtype) for name, part in model.components.items()}
    pipeline = getattr(diffusers, model.pipeline)
    expected = inspect.signature(pipeline.__init__).parameters
    absent = {name: None for name in model.absent if name in expected}
    return pipeline(**parts, **absent, **model.options)


def build_part(name: str, part: KnownComponent, dtype: torch.dtype | None = None) -> Any:
    """Return the component `name`: a network with large tensors on "meta", a stand-in tokenizer, or the part itself.

    Schedulers, image processors and guiders are the library's own. ModelError where the library has no such class.
    """
    tokens = part.class_name.endswith(("Tokenizer", "Processor")) and not part.class_name.endswith("ImageProcessor")
    if "tokenizer" in name or tokens:
        return (StandInProcessor if "patch_size" in part.config else StandInTokenizer)(**part.config)
    kind = part_class(part.library, part.class_name)
    if kind is None:
        raise ModelError(f"{part.library} has no {part.class_name}: a newer version may", name=name)
    theirs = part.library == "transformers"
    if part.dtype is None:
        return kind(**part.config) if theirs else kind.from_config(part.config)
    config = kind.config_class(**part.config) if theirs else part.config
    return build_network(
        lambda: kind(config) if theirs else kind.from_config(config),
        dtype or getattr(torch, part.dtype),
    )


def part_class(library: str, name: str) -> Any:
    """Return the class `name` of diffusers, of transformers, or of diffusers' pipelines of a family; None if missing.

    The libraries are named as in a pipeline's model_index.json: "ltx2" for `diffusers.pipelines.ltx2`.
    """
    known = {"diffusers": diffusers, "transformers": transformers}
    return getattr(known.get(library) or getattr(diffusers.pipelines, library, None), name, None)


def build_network(make: Callable[[], nn.Module], dtype: torch.dtype, most: int | None = None) -> nn.Module:
    """Return the network that `make` creates, for inference in `dtype`, with its large tensors on "meta".

    ModelError as soon as it makes more than `most` tensors.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as when loading: buffers that are in no file are created in it
    try:
        network = _made(make, math.inf if most is None else most)
    finally:
        torch.set_default_dtype(usual)
    return _in_dtype(network.eval(), dtype)


def _made(make: Callable[[], nn.Module], most: float) -> nn.Module:
    try:
        with _LargeOnMeta(most, HUGE):
            return make()
    except ModelError:
        raise
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # it may have read values of a huge table
        with _LargeOnMeta(most):
            return make()


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on "meta"; small tensors, and tensors computed from them, keep their values.

    (With everything on "meta", tables that a network computes for itself would be lost.) Computed tensors of `huge`
    elements or more are moved to "meta" too, and so is everything computed from them: SD 3.5's positions are 90 million
    numbers.
    """

    def __init__(self, most: float, huge: float = math.inf) -> None:
        super().__init__()
        self._most, self._left, self._huge = most, most, huge

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", None) in _INITIALIZING:
            filled = kwargs.get("tensor", args[0] if args else None)
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled  # same result as torch's, which takes milliseconds of Python for each
        if func in _MAKERS:
            self._left -= 1
            if self._left < 0:
                raise ModelError(f"the network has more than {self._most:,} tensors", most=self._most)
        if func in _MAKERS and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if math.prod(size) > LARGE:
                kwargs["device"] = "meta"
        given = [*args, *kwargs.values()]
        for value in tuple(given):
            given += value if isinstance(value, list | tuple) else ()  # `torch.cat` takes a list
        if any(map(self._is_huge, given)) and not all(map(_has_no_memory, given)):
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        found = func(*args, **kwargs)
        return _on_meta(found) if self._is_huge(found) else found

    def _is_huge(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() >= self._huge


def _has_no_memory(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_meta


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


_INITIALIZING = ("torch.nn.init", "transformers.initialization")  # which replaces torch's while it makes a network
_MAKERS = (torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros)


def _in_dtype(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert to `dtype` as `from_pretrained` does, except what the class keeps in float32.

    transformers selects those by parts of names and by half-precision dtype (T5's "wo": float16 only), diffusers by
    whole names and always. Buffers that are in no file keep their dtype.
    """
    if isinstance(network, transformers.PreTrainedModel):
        kept = [pattern.replace("*", ".*") for pattern in network._get_dtype_plan(dtype)]
    else:
        kept = [rf"(^|\.){re.escape(name)}(\.|$)" for name in getattr(network, "_keep_in_fp32_modules", None) or ()]
    in_float32 = re.compile("|".join(kept) or "(?!)")
    for path, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if in_float32.search(path) else dtype)
    return network
