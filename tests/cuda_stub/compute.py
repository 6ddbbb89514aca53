"""Numbers on the stub's cards: each operation is given to CUDA as ever, and then done on the CPU in the same memory.

torch's CUDA path allocates and launches, and computes nothing; `Compute` does the operation again with CPU tensors that
lie in the very same bytes. Copies stay what the CUDA path makes of them, on the streams it makes them on; before an
operation only those copies are done that its stream has waited for (with STUB_ASYNC): who forgets to wait computes
with what was there before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_stub.accesses import (
    PLAIN,
    changed_within,
    current_stream,
    fills_its_bytes,
    on_card,
    on_cpu,
    report_accesses,
    tensors_in,
)
from tightfit.simulator.fused_backward import BACKWARD_STAND_INS

__all__ = ["Compute", "computing", "not_computed"]

RACES = os.environ.get("STUB_RACES", "0") != "0"
COPIED_BY_STUB = 2**63 if os.environ.get("STUB_COPY") == "1" else int(os.environ.get("STUB_COPY_MAX", "65536"))
WITHOUT_ARITHMETIC = {
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_", "set_", "record_stream",
    "_pin_memory", "is_pinned", "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit",
    "lift_fresh", "_efficient_zerotensor", "is_same_size", "sym_size", "_has_same_storage_numel", "_reshape_alias",
    "_unsafe_view",
}  # fmt: skip
COPIES = ("copy_", "_to_copy", "_copy_from", "clone")

not_computed: dict[str, str] = {}  # operations that the CPU would not do, and why
_library = ctypes.CDLL(None)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """With numbers, in this thread and in those that are started within."""
    torch.cuda.init()
    run = threading.Thread.run

    def run_computing(self: threading.Thread) -> None:
        with Compute():
            run(self)

    threading.Thread.run = run_computing  # type: ignore[method-assign]
    try:
        with Compute():
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


class Compute(TorchDispatchMode):
    """Operations are computed; with `most`, those whose tensors on cards all have up to so many bytes.

    `most_whole` is that for integers and truth values: positions and masks decide what happens next.
    """

    def __init__(self, most: int | None = None, most_whole: int = 0) -> None:
        super().__init__()
        self.most, self.most_whole = most, most_whole

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a subclass does it with others, which come here
        if function.namespace == "c10d":
            return function(*args, **kwargs)  # the stub's NCCL does it
        seed = _seed(function, kwargs)
        if _name(function) == "index":
            args = (args[0], _positions(args[1]))
        elif torch.Tag.dynamic_output_shape in function.tags and self._computes(_on_cards(args, kwargs)):
            return _of_unknown_size(function, args, kwargs)
        out = function(*args, **kwargs)
        tensors = _on_cards(args, kwargs, out)
        if _name(function) in WITHOUT_ARITHMETIC or _is_view(function, args, out, tensors):
            return out
        crosses = _name(function) in COPIES and len({t.device for t in _ends(function, args, out)}) > 1
        if RACES and not crosses:  # the stub itself sees what crosses a link
            report_accesses(function, args, kwargs, out)
        plain = tensors and all(type(t) in PLAIN for t in tensors)
        if not plain or not self._computes(tensors) or _copied(function, args, out, tensors):
            return out
        catch_up(tensors)
        return _computed(function, args, kwargs, out, seed)

    def _computes(self, tensors: list[torch.Tensor]) -> bool:
        return self.most is None or all(tensor.nbytes <= self._most_of(tensor.dtype) for tensor in tensors)

    def _most_of(self, dtype: torch.dtype) -> int:
        assert self.most is not None
        return self.most if dtype.is_floating_point or dtype.is_complex else max(self.most, self.most_whole)


def _on_cards(*values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(values) if tensor.device.type == "cuda"]


def catch_up(tensors: Any = ()) -> None:
    """Copies that the current stream (of each card that has some of `tensors`) has waited for are done now."""
    for card in {t.device for t in tensors} or {None}:
        with on_card(card):
            _library.stub_upto(current_stream(card))


@functools.cache
def _name(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])


@functools.cache
def _takes_generator(function: Any) -> bool:
    return "generator" in {argument.name for argument in function._schema.arguments}


def _seed(function: Any, kwargs: dict[str, Any]) -> int | None:
    """For random numbers, of the card's generator as it stands."""
    if not _takes_generator(function) and torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cuda":
        return None
    generator = generator or torch.cuda.default_generators[0]
    return int((generator.initial_seed() * 1000003 + generator.get_offset()) % 2**63)


def _of_unknown_size(function: Any, args: Any, kwargs: Any) -> Any:
    """What only the numbers tell the size of: the card itself would have to be asked."""
    catch_up()
    ours = changed_within(on_cpu, (args, kwargs))
    store = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    return changed_within(lambda t: t.to(store), function(*ours[0], **ours[1]))


def _positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """`indices` with masks as the positions that they select: CUDA's kernel for masks would count what is not there."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8) or index.device.type != "cuda":
            found.append(index)
        else:
            catch_up([index])
            found += on_cpu(index).nonzero().to(index.device).unbind(1)
    return found


def _ends(function: Any, args: Any, out: Any) -> list[torch.Tensor]:
    """Target and source of a copy."""
    return [t for t in (args[:2] if _name(function) == "copy_" else (out, args[0])) if isinstance(t, torch.Tensor)]


@functools.cache
def _returns_views(function: Any) -> bool:
    views = [r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns]
    return bool(views) and all(views)


def _is_view(function: Any, args: Any, out: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether nothing is computed; in inference mode "reshape" and "contiguous" may copy."""
    if not _returns_views(function):
        return False
    if any(type(t) not in PLAIN for t in tensors):
        return True
    if function._schema.is_mutable:
        return False
    made = out if isinstance(out, tuple | list) else (out,)
    is_made = [any(t is each for each in made) for t in tensors]
    given = {t.untyped_storage().data_ptr() for t, new in zip(tensors, is_made, strict=True) if not new}
    inside = all(t.untyped_storage().data_ptr() in given for t, new in zip(tensors, is_made, strict=True) if new)
    return inside or {t.device.type for t in _ends(function, args, out)} != {"cuda"}


def _copied(function: Any, args: Any, out: Any, tensors: list[torch.Tensor]) -> bool:
    """Does what a copy has beside a plain cudaMemcpyAsync; False for what is no copy."""
    name = _name(function)
    if name not in COPIES:
        return False
    target, source = (args[0], args[1]) if name == "copy_" else (out, args[0])
    crosses = target.device != source.device
    if not crosses and name != "copy_":
        return False
    alike = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
    if crosses and alike and fills_its_bytes(target) and target.nbytes <= COPIED_BY_STUB:
        return True  # the stub does it when its stream gets there
    for card in {t.device for t in (target, source) if crosses and t.device.type == "cuda"}:
        torch.cuda.current_stream(card).synchronize()  # what its path has copied is not computed yet
    catch_up(tensors)
    on_cpu(target).copy_(on_cpu(source))
    return True


def _attention(function: Any, args: Any, kwargs: Any) -> Any:
    """Fused attention, by whatever kernel: query, key, value, and a mask where it takes one; and the log-sum-exp."""
    named = {a.name: v for a, v in zip(function._schema.arguments, args, strict=False)} | kwargs
    mask = named.get("attn_bias")
    plain = mask is None and not named.get("is_causal", False) and named["query"].shape[1] == named["key"].shape[1]
    if plain and named.get("compute_log_sumexp", True) and named["key"].shape == named["value"].shape:
        parts = (named[name].float() for name in ("query", "key", "value"))
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, scale=named.get("scale"))
        return (out.to(named["query"].dtype), total) + (None,) * (len(function._schema.returns) - 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(named[name].float() for name in ("query", "key", "value")),
        attn_mask=None if mask is None else mask.float(),
        is_causal=named.get("is_causal", False),
        scale=named.get("scale"),
    )
    return (out.to(named["query"].dtype),) + (None,) * (len(function._schema.returns) - 1)


def _operation(function: Any, args: Any, kwargs: Any) -> Any:
    """Any other operation; in float32 where the CPU has no kernel for a mixture of dtypes that CUDA has one for."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    try:
        return function(*args, **kwargs)
    except RuntimeError:
        if function._schema.is_mutable:
            raise
        args, kwargs = changed_within(wide, (args, kwargs))
        return function(*args, **kwargs)


def _computed(function: Any, args: Any, kwargs: Any, out: Any, seed: int | None) -> Any:
    """`out`, with numbers."""
    changed = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if changed.get("device") is not None:
        changed["device"] = torch.device("cpu")
    if seed is not None and _takes_generator(function):
        changed["generator"] = torch.Generator().manual_seed(seed)
    ours = changed_within(on_cpu, (args, changed))
    fused = _name(function).startswith("_scaled_dot_product_") and not _name(function).endswith(("_for_cpu", "_math"))
    try:
        if function in BACKWARD_STAND_INS:
            wanted = BACKWARD_STAND_INS[function](*ours[0], **ours[1])
        else:
            wanted = (_attention if fused else _operation)(function, *ours)
    except (NotImplementedError, RuntimeError) as error:
        not_computed.setdefault(str(function), str(error)[:200])
        return out
    if function._schema.is_mutable:
        return out  # in these very bytes
    several = isinstance(out, tuple | list)
    results = list(out) if several else [out]
    for index, (got, right) in enumerate(zip(results, wanted if several else [wanted], strict=False)):
        if isinstance(got, torch.Tensor) and isinstance(right, torch.Tensor) and got.device.type == "cuda":
            if fused and got.shape[:-1] == right.shape[:-1] and got.shape[-1] > right.shape[-1]:
                on_cpu(got).fill_(float("inf"))[..., : right.shape[-1]] = right  # a padded log-sum-exp
            elif got.shape != right.shape:  # as many as the numbers say
                results[index] = right.to(got.device)
            else:
                on_cpu(got).copy_(right)
        elif isinstance(got, bool):  # torch.equal's
            results[index] = right
    return type(out)(results) if several else results[0]
