"""The torch device "pretend": every operation on it comes here, and runs on the CPU's numbers or on shapes alone.

torch lets the device type PrivateUse1 be written in Python (`_setup_privateuseone_for_python_backend`, from 2.10
on, marked experimental: this is the only file that knows of it). An operation is one kernel here where CUDA has one
kernel for it, so that memory is what it is there; what CUDA puts together from others is put together from them here.
Which is which stands in torch's own table of native functions, which every torch brings along.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import torch
import yaml
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tightfit.errors import RunError
from tightfit.pretend.card import Card
from tightfit.pretend.storage import CPU_KEYS, new_tensor, store_of, view

__all__ = ["install", "use_cards"]

NAME = "pretend"
SMALL = 64 * 2**10  # bytes up to which tensors keep their values when shapes are enough
aten = torch.ops.aten
_cards: list[Card] = []


class _DeviceModule:
    """What torch asks a device's module (`torch.pretend`)."""

    def is_available(self) -> bool:
        return bool(_cards)

    def device_count(self) -> int:
        return len(_cards)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        for card in _cards:
            card.timeline.synchronize()

    def empty_cache(self) -> None:
        for card in _cards:
            card.allocator.empty_cache()


def use_cards(cards: list[Card]) -> None:
    """From now on, these are the cards there are. What is still alive on others stays on them."""
    install()
    _cards[:] = cards


@functools.cache
def install() -> None:
    """Registers the device, once for the process. RunError where another backend has taken its place in torch."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise RunError(f"torch has room for one backend of somebody else's, and {taken} has taken it", taken=taken)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_dispatch, "PrivateUse1")
    _libraries.append(library)
    library = torch.library.Library("aten", "IMPL")
    ops = {_overload(name): None for name in _cuda_kernels()} | dict.fromkeys(_ONE_KERNEL)
    for op in ops:
        if op is not None:
            library.impl(op, functools.partial(_dispatch, _ONE_KERNEL.get(op, op)), "PrivateUse1")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []  # what they registered goes when they do


# one kernel on CUDA, though the table has no CUDA key for them; and what runs in their place
_ONE_KERNEL = {
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.scaled_dot_product_attention.default: aten.scaled_dot_product_attention.default,
}


def _cuda_kernels() -> list[str]:
    """Names of the operations for which CUDA has a kernel of its own, from torch's table."""
    text = (files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    table = {entry["func"].partition("(")[0]: entry for entry in yaml.load(text, Loader=yaml.CSafeLoader)}
    return [name for name, entry in table.items() if _on_cuda(table[entry.get("structured_delegate", name)])]


def _on_cuda(entry: dict[str, Any]) -> bool:
    return any("CUDA" in keys.split(", ") for keys in entry.get("dispatch") or {})


def _overload(name: str) -> torch._ops.OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(aten, packet, None), overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def _dispatch(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    if op in _VIEWS:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    return _compute(op, args, kwargs)


_VIEWS = {aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default,
          aten.view_as_real.default, aten.view_as_complex.default}  # fmt: skip


def _card(device: torch.device) -> Card:
    index = device.index or 0
    if index >= len(_cards):
        raise RunError(f"there is no {NAME}:{index}: {len(_cards)} pretend cards are in use", cards=len(_cards))
    return _cards[index]


def _keeps_values(card: Card, size: int) -> bool:
    return card.values == "real" or size <= SMALL


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _new_like(shape, _card(torch.device(device)))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _new_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"), _card(torch.device(device)))


def _new_like(shape: torch.Tensor, card: Card) -> torch.Tensor:
    """A tensor on `card` like `shape`, with memory but nothing in it."""
    size = shape.untyped_storage().nbytes()
    values = torch.UntypedStorage(size) if _keeps_values(card, size) else None
    return new_tensor(card, shape.dtype, shape.shape, shape.stride(), size, values)


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """What `tensor` stands for: numbers on the CPU, or a shape on meta."""
    store = store_of(tensor)
    if store.values is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(store.values, tensor.storage_offset(), tensor.shape, tensor.stride())


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between the host and a card, two cards, or two dtypes on one."""
    if target.device.type == "cpu":
        inner = _inner(source)
        if inner.is_meta:
            raise RunError(_valueless("a copy to the host", source))
        target.copy_(inner)
    else:
        store = store_of(target)
        inner = _inner(source) if source.device.type == NAME else source
        if inner.is_meta:
            store.values = None
        if store.values is not None:
            _inner(target).copy_(inner)
    return target


def _item(tensor: torch.Tensor) -> Any:
    inner = _inner(tensor)
    if inner.is_meta:
        raise RunError(_valueless("item()", tensor))
    return inner.item()


def _valueless(what: str, tensor: torch.Tensor) -> str:
    return f"{what} needs the values of a tensor of shape {tuple(tensor.shape)}, of which only the shape is kept"


def _set(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    overloads = {torch.Tensor: aten.set_.source_Tensor}
    op = overloads.get(type(args[0]), aten.set_.source_Storage_storage_offset)
    result: torch.Tensor = op.redispatch(CPU_KEYS, tensor, *args)
    return result


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    inner = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta").resize_(size)
    if inner.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
        fresh = _new_like(inner, _card(tensor.device))
        aten.set_.source_Tensor.redispatch(CPU_KEYS, tensor, fresh)
        return tensor
    seen = view(tensor, inner.shape, inner.stride(), tensor.storage_offset())
    result: torch.Tensor = aten.set_.source_Tensor.redispatch(CPU_KEYS, tensor, seen)
    return result


_SPECIAL: dict[Any, Any] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten._copy_from.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.resize_.default: _resize,
    aten.set_.source_Storage_storage_offset: _set,
    aten.set_.source_Tensor: _set,
}


def _compute(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `op` on what its tensors stand for, and gives what comes out a place on the card."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    outer = [value for value in flat if isinstance(value, torch.Tensor) and value.device.type == NAME]
    devices = {tensor.device for tensor in outer} | {value for value in flat if isinstance(value, torch.device)}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, devices)))}! ({op})"
        )
    card = _card(next(iter(devices)))
    inner = {id(tensor): _inner(tensor) for tensor in outer}
    shapes = any(value.is_meta for value in inner.values())
    place = torch.device("meta" if shapes else "cpu")

    def enter(value: Any) -> Any:
        if isinstance(value, torch.device):
            return place
        if not isinstance(value, torch.Tensor):
            return value
        value = inner.get(id(value), value)
        return value.to("meta") if shapes and not value.is_meta else value

    entered = [enter(value) for value in flat]
    homes = {
        new.untyped_storage()._cdata: old
        for old, new in zip(flat, entered, strict=True)
        if isinstance(new, torch.Tensor)
    }
    originals = {id(new): old for old, new in zip(flat, entered, strict=True) if isinstance(new, torch.Tensor)}
    inner_args, inner_kwargs = pytree.tree_unflatten(entered, spec)
    before = {id(new): new.shape for new in entered if isinstance(new, torch.Tensor)}
    result = op(*inner_args, **inner_kwargs)

    def leave(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in originals:
            old = originals[id(value)]
            if value.shape != before[id(value)]:
                fresh = _wrap(value, card)
                aten.set_.source_Tensor.redispatch(CPU_KEYS, old, fresh)
            elif shapes:
                store_of(old).values = None
            return old
        home = homes.get(value.untyped_storage()._cdata)
        if home is not None:
            return view(home, value.shape, value.stride(), value.storage_offset())
        return _wrap(value, card)

    return pytree.tree_map(leave, result)


def _wrap(value: torch.Tensor, card: Card) -> torch.Tensor:
    storage = value.untyped_storage()
    size = storage.nbytes()
    keeps = not value.is_meta and _keeps_values(card, size)
    return new_tensor(card, value.dtype, value.shape, value.stride(), size, storage if keeps else None)
