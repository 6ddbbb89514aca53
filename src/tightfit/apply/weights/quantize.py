"""Puts a component's weights into eight-bit storage, and the originals somewhere from where they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.apply.weights.disk_store import read_like
from tightfit.apply.weights.file_weights import FileBackedWeights
from tightfit.apply.weights.quantized_tensor import Entry, Float8Weight, StoredWeight, storable
from tightfit.apply.weights.weight_store import HOST, plain_parts, rebuilt
from tightfit.devices.activation_pool import is_dense
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.devices.memory import own_room
from tightfit.errors import PlanError
from tightfit.measure.modules import layer_weights
from tightfit.schema.plan import ComponentPlan, Plan, Storage

__all__ = ["check_kinds", "check_storage", "left_in_files", "storable_in", "store_weights"]

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


def check_kinds(components: Mapping[str, nn.Module], plan: Plan, device_of: Callable[[str], Device]) -> None:
    """PlanError where weights would be moved that carry more than their numbers, and nobody here knows how.

    Those of bitsandbytes have the state of their quantisation beside them, diffusers' GGUF ones the name of it. Where
    they stay on the device on which they are, they are as they were.
    """
    for name, module in components.items():
        chosen, device = plan.components.get(name, ComponentPlan()), device_of(name)
        host_is_store = not device.separate and chosen.offload_to != "disk"
        resident = (chosen.placement == "resident" or host_is_store) and not device.swaps_parameters
        for path, weight in module.named_parameters():
            kind = type(weight)
            if kind is nn.Parameter or is_traceable_wrapper_subclass(weight):
                continue
            if not (resident and weight.device == device.torch_device):
                raise PlanError(
                    f"{name}: {path} is a {kind.__name__}, whose values cannot be moved without what belongs to them: "
                    f"load {name} without that quantisation, or move it to {device.name} before and leave it "
                    f"resident (as storage, tightfit has float8_e4m3fn, float8_e5m2 and int8 of its own)",
                    name=name,
                )


def storable_in(module: nn.Module, plan: ComponentPlan) -> list[Entry]:
    """What `plan` stores in eight bits: matrices and kernels; as int8 the matrices of linear layers only."""
    if plan.storage == "as-loaded":
        return []
    return list(storable(module, plan.skip_patterns, nn.Linear if plan.storage == "int8" else nn.Module))


def left_in_files(network: nn.Module, chosen: ComponentPlan, *, separate: bool) -> set[int]:
    """By id, the weights that `network` can follow `chosen` without: each is read when it is used, or stored.

    On a `separate` device, whose memory is not the host's, or on the CPU.
    """
    weights = {id(weight) for _, _, weight in storable_in(network, chosen)}
    if chosen.placement == "resident":
        return set() if separate else weights
    if chosen.offload_to == "disk" and chosen.compute_dtype is None:  # else all that is not stored is converted
        weights |= layer_weights(network)
    return {id(weight) for weight in network.parameters() if weight.is_meta}.intersection(weights)


def store_weights(
    module: nn.Module,
    plan: ComponentPlan,
    file_weights: FileBackedWeights,
    *,
    originals_in_ram: bool,
    aside: Callable[[nn.Parameter, StoredWeight], None] = lambda original, weight: None,
) -> Callable[[], None]:
    """Stores what `plan` wants of `module`'s weights in eight bits in host memory, one weight after another.

    So a device never holds what the plan stores in eight bits in another form; what was there leaves it here.
    Originals in `file_weights` are read from there one by one, and stay there; others go to RAM, or to a temporary file
    where RAM is what should be saved. `aside` is given each original and what it became.

    Returns how to restore the originals exactly.
    What was written into a stored weight in the meantime (a fused LoRA) wins over its original.
    """
    compute = getattr(torch, plan.compute_dtype) if plan.compute_dtype else None
    entries = storable_in(module, plan)
    originals = {id(original): original for _, _, original in entries}
    places = {key: original.device for key, original in originals.items()}
    stored: dict[int, StoredWeight] = {}
    with _put_back_on_failure(originals, places), DiskReader() as reader:
        for key, original in originals.items():
            file = file_weights.where(original)
            _place(original, HOST)
            there = original if file is None else read_like(original, file, reader)
            weight = stored[key] = _stored(there, plan.storage, compute, original.requires_grad)
            aside(original, weight)
    for owner, name, original in entries:
        owner._parameters[name] = stored[id(original)]  # type: ignore[assignment]
    kept = _set_aside(originals, file_weights, in_ram=originals_in_ram)
    cast = _cast_rest(module, compute) if compute else []

    def restore() -> None:
        with DiskReader() as reader:
            back = {
                key: shape
                if file_weights.resident and places[key].type in ("cpu", "meta") and not stored[key].written
                else file_weights.filled(shape, reader)
                for key, shape in kept.items()
            }
        for owner, name, original in entries:
            parameter, value = stored[id(original)], back[id(original)]
            if owner._parameters.get(name) is not parameter:  # type: ignore[comparison-overlap]
                continue  # somebody put another there: theirs stands
            if parameter.written:
                value.data.copy_(parameter.widen())
            _place(value, places[id(original)])
            owner._parameters[name] = value
        for table, name, loaded, changed in cast:
            if table.get(name) is changed:
                table[name] = loaded

    return restore


def _place(weight: nn.Parameter, device: torch.device) -> None:
    """`weight` is on `device` from now on; what is only a shape stays one."""
    if not weight.is_meta and device.type != "meta" and weight.device != device:
        weight.data = weight.data.to(device)


@contextmanager
def _put_back_on_failure(weights: Mapping[int, nn.Parameter], places: Mapping[int, torch.device]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for key, weight in weights.items():
            _place(weight, places[key])
        raise


def _set_aside(
    originals: Mapping[int, nn.Parameter], file_weights: FileBackedWeights, *, in_ram: bool
) -> dict[int, nn.Parameter]:
    """What stands for `originals`, by key, while they are replaced: themselves, or shapes in `file_weights`."""
    file, kept = None, dict(originals)
    for key, original in originals.items():
        if in_ram or original.is_meta:  # on the shelf already, or without values everywhere
            continue
        file = file or file_weights.spill()
        like = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device="meta")
        where = file.write(original if is_dense(original) else original.contiguous())
        kept[key] = file_weights.shape_of(original, like, where)
        original.data = torch.empty(0, dtype=original.dtype)
    if file is not None:
        file.finish()
    return kept


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
