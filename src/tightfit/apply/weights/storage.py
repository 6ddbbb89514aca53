"""Puts a component's weights into eight-bit storage, and the originals somewhere from where they come back."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tightfit.apply.weights.disk import Stored, read_like
from tightfit.apply.weights.eight_bits import Entry, StoredWeight, storable
from tightfit.apply.weights.fp8 import Float8Weight
from tightfit.apply.weights.homes import plain_parts, rebuilt
from tightfit.devices.disk import DiskReader
from tightfit.devices.memory import own_room
from tightfit.errors import PlanError
from tightfit.records import ComponentPlan, Plan, Storage

__all__ = ["check_storage", "storable_in", "store_weights"]

PIECE = 4 * 2**20  # bytes that are stored in eight bits at once


def check_storage(plan: Plan) -> None:
    """PlanError where a component is to be stored as int8 and torchao is not installed. Loads it where it is."""
    for name, chosen in plan.components.items():
        if chosen.storage == "int8":
            try:
                import_module("tightfit.apply.weights.int8")
            except ImportError as error:
                raise PlanError(
                    f"{name}: storage=int8 needs torchao 0.18 or newer ({error}): pip install 'tightfit[int8]'",
                    name=name,
                ) from error


class _Originals:
    """Weights set aside: kept in RAM, or written to a temporary file where RAM is what should be saved."""

    def __init__(self, parameters: list[nn.Parameter], in_ram: bool) -> None:
        parameters = [parameter for parameter in parameters if not parameter.is_meta]  # which has no values
        self._parameters = parameters
        self._file: Path | None = None
        if in_ram:
            for parameter in parameters:
                parameter.data = parameter.data.to("cpu")  # whoever moved them to the device moves them back
        if in_ram or not parameters:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="tightfit-originals-")
        self._forget = weakref.finalize(self, self._folder.cleanup)
        self._file = Path(self._folder.name) / "weights.safetensors"
        self._strides = [parameter.stride() for parameter in parameters]
        save_file({str(i): p.data.contiguous().clone() for i, p in enumerate(parameters)}, self._file)
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def give_back(self) -> None:
        """Every parameter holds its original values again, in their original strides."""
        if self._file is None:
            return
        tensors = load_file(self._file)
        for index, (parameter, strides) in enumerate(zip(self._parameters, self._strides, strict=True)):
            value = tensors.pop(str(index))
            data = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=parameter.device)
            parameter.data = data.copy_(value)
        self._forget()
        self._file = None


def storable_in(module: nn.Module, plan: ComponentPlan) -> list[Entry]:
    """What `plan` stores in eight bits: matrices and kernels; as int8 the matrices of linear layers only."""
    if plan.storage == "as-loaded":
        return []
    return list(storable(module, plan.skip, nn.Linear if plan.storage == "int8" else nn.Module))


def store_weights(
    module: nn.Module,
    plan: ComponentPlan,
    *,
    originals_in_ram: bool,
    files: Mapping[int, Stored] | None = None,
    aside: Callable[[nn.Parameter, StoredWeight], None] = lambda original, weight: None,
) -> tuple[int, Callable[[], None]]:
    """Stores what `plan` wants of `module`'s weights in eight bits, one weight after another.

    `files` says, by id, which file holds an original that was not read; it is read there, and again to restore it.
    `aside` is given each original and what it became.

    Returns by how many bytes the module's weights grew (negative), and how to restore the originals exactly.
    What was written into a stored weight in the meantime (a fused LoRA) wins over its original.
    """
    compute = getattr(torch, plan.compute_dtype) if plan.compute_dtype else None
    entries = storable_in(module, plan)
    each = {id(original): original for _, _, original in entries}
    unread = {key: files[key] for key in each if files is not None and key in files}
    stored: dict[int, StoredWeight] = {}
    grown = 0
    with DiskReader() as reader:
        for key, original in each.items():
            there = read_like(original, unread[key], reader) if key in unread else original
            weight = stored[key] = _stored(there, plan.storage, compute, original.requires_grad)
            grown += weight.nbytes - original.nbytes
            aside(original, weight)
    for owner, name, original in entries:
        owner._parameters[name] = stored[id(original)]  # type: ignore[assignment]
    originals = _Originals(list(each.values()), originals_in_ram)
    cast = _cast_rest(module, compute) if compute else []

    def restore() -> None:
        originals.give_back()
        with DiskReader() as reader:
            for key, file in unread.items():
                each[key] = nn.Parameter(read_like(each[key], file, reader), each[key].requires_grad)
        for owner, name, original in entries:
            parameter, value = stored[id(original)], each[id(original)]
            if owner._parameters.get(name) is not parameter:  # type: ignore[comparison-overlap]
                continue  # somebody put another there: theirs stands
            if parameter.written:
                value.data.copy_(parameter.widen())
            owner._parameters[name] = value
        for table, name, loaded, changed in cast:
            if table.get(name) is changed:
                table[name] = loaded

    return grown, restore


def _stored(original: torch.Tensor, storage: Storage, compute: torch.dtype | None, asks: bool) -> StoredWeight:
    """`original` in eight bits.

    Some rows at a time, and into memory of its own: what the conversion needs beside them comes and goes, and what
    lives long between would leave the heap full of holes.
    """
    value = original.detach()
    if value.device.type == "cpu" and value.stride(0) == max(value.stride()):
        pieces = torch.split(value, max(PIECE // max(value[:1].nbytes, 1), 1))
        like, at = _converted(pieces[0], storage, compute), len(pieces[0])
        first = plain_parts(like)
        parts = [own_room((len(value), *part.shape[1:]), part.stride(), part.dtype) for part in first]
        for whole, part in zip(parts, first, strict=True):
            whole[:at] = part
        for piece in pieces[1:]:
            for whole, part in zip(parts, plain_parts(_converted(piece, storage, compute)), strict=True):
                whole[at : at + len(piece)] = part
            at += len(piece)
        weight = rebuilt(like, parts)
    else:
        weight = _converted(value, storage, compute)
    parameter = nn.Parameter(weight, requires_grad=asks)
    assert isinstance(parameter, StoredWeight)  # a parameter keeps the class of its tensor
    return parameter


def _converted(rows: torch.Tensor, storage: Storage, compute: torch.dtype | None) -> StoredWeight:
    if storage == "int8":
        from tightfit.apply.weights.int8 import Int8Weight  # torchao need not be there

        return Int8Weight.store(rows, compute)
    return Float8Weight.store(rows, getattr(torch, storage), compute)


def _cast_rest(module: nn.Module, dtype: torch.dtype) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Everything of `module` that stays as loaded, in the compute dtype: what was where, and what is there now."""
    changed = []
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.is_floating_point():
                    continue
                if tensor.dtype != dtype:
                    cast = tensor.detach().to(dtype)
                    asks = tensor.requires_grad
                    table[name] = nn.Parameter(cast, asks) if isinstance(tensor, nn.Parameter) else cast
                    changed.append((table, name, tensor, table[name]))
    return changed
