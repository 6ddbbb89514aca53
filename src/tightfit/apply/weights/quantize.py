"""Store a component's weights in eight bits, and keep the originals so that they can be restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.apply.weights.disk_store import read_like
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.quantized_tensor import Entry, Float8Weight, StoredWeight, storable
from tightfit.apply.weights.weight_store import HOST, plain_parts, rebuilt
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.devices.memory import empty_in_arena
from tightfit.devices.pinned_pool import is_dense
from tightfit.errors import PlanError
from tightfit.measure.modules import layer_weights
from tightfit.schema.plan import ComponentPlan, Plan, Storage

__all__ = ["check_kinds", "check_storage", "left_in_files", "storable_in", "store_weights"]

PIECE = 4 * 2**20  # bytes of a weight that are converted at once


def check_storage(plan: Plan) -> None:
    """Raise PlanError where a plan stores a component as int8 and torchao is not installed; else import it."""
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
    """Raise PlanError where a plan moves weights of unsupported types, which carry more than their values.

    bitsandbytes' weights also have the state of their quantisation, diffusers' GGUF weights the name of it. Where
    they are resident on the device that they are on already, they are left unchanged.
    """
    for name, module in components.items():
        chosen, device = plan.components.get(name, ComponentPlan()), device_of(name)
        resident = not (chosen.moves(separate=device.separate) or device.swaps_parameters or chosen.split)
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
    """Return the weights that `plan` stores in eight bits: matrices and kernels; as int8, linear layers' only."""
    if plan.storage == "as-loaded":
        return []
    return list(storable(module, plan.skip_patterns, nn.Linear if plan.storage == "int8" else nn.Module))


def left_in_files(network: nn.Module, chosen: ComponentPlan, *, separate: bool) -> set[int]:
    """Return ids of weights that can be left in files under `chosen`: each is read when it is used, or converted.

    `separate`: whether the device has memory of its own, as the CPU has not.
    """
    weights = {id(weight) for _, _, weight in storable_in(network, chosen)}
    if chosen.placement == "resident":
        return set() if separate else weights
    if chosen.store.in_files and chosen.compute_dtype is None:  # else all other weights are cast
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
    """Store the weights of `module` that `plan` names in eight bits in host memory, one after another.

    So a device need not hold them in another dtype; originals on a device are moved to host memory. Originals in
    `file_weights` are read one by one and stay in their files; others are kept in RAM (`originals_in_ram`), or in a
    temporary file where RAM is to be saved. `aside` is called with each original and its stored weight.

    Return how to restore the originals exactly.
    A stored weight that was changed in the meantime (a fused LoRA) overwrites its original.
    """
    compute = getattr(torch, plan.compute_dtype) if plan.compute_dtype else None
    entries = storable_in(module, plan)
    originals = {id(original): original for _, _, original in entries}
    devices = {key: original.device for key, original in originals.items()}
    stored: dict[int, StoredWeight] = {}
    with _put_back_on_failure(originals, devices), DiskReader() as reader:
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
                if file_weights.keep_in_files and devices[key].type in ("cpu", "meta") and not stored[key].written
                else file_weights.filled(shape, reader)
                for key, shape in kept.items()
            }
        for owner, name, original in entries:
            parameter, value = stored[id(original)], back[id(original)]
            if owner._parameters.get(name) is not parameter:  # type: ignore[comparison-overlap]
                continue  # replaced by other code: keep that
            if parameter.written:
                value.data.copy_(parameter.widen())
            _place(value, devices[id(original)])
            owner._parameters[name] = value
        for table, name, loaded, changed in cast:
            if table.get(name) is changed:
                table[name] = loaded

    return restore


def _place(weight: nn.Parameter, device: torch.device) -> None:
    """Move `weight` to `device`; a "meta" parameter is left as it is."""
    if not weight.is_meta and device.type != "meta" and weight.device != device:
        weight.data = weight.data.to(device)


@contextmanager
def _put_back_on_failure(weights: Mapping[int, nn.Parameter], devices: Mapping[int, torch.device]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for key, weight in weights.items():
            _place(weight, devices[key])
        raise


def _set_aside(
    originals: Mapping[int, nn.Parameter], file_weights: FileBackedWeights, *, in_ram: bool
) -> dict[int, nn.Parameter]:
    """Return what keeps `originals`, by key, while they are replaced: themselves, or shapes in `file_weights`."""
    file, kept = None, dict(originals)
    for key, original in originals.items():
        if in_ram or original.is_meta:  # to be kept in RAM, or without values
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
    """Return `original` in eight bits.

    It is converted some rows at a time, into memory of its own: long-lived tensors between the conversion's temporary
    ones would fragment the heap.
    """
    value = original.detach()
    if value.device.type == "cpu" and value.stride(0) == max(value.stride()):
        pieces = torch.split(value, max(PIECE // max(value[:1].nbytes, 1), 1))
        like, at = _converted(pieces[0], storage, compute), len(pieces[0])
        first = plain_parts(like)
        parts = [empty_in_arena((len(value), *part.shape[1:]), part.stride(), part.dtype) for part in first]
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
        from tightfit.apply.weights.int8 import Int8Weight  # torchao is optional

        return Int8Weight.store(rows, compute)
    return Float8Weight.store(rows, getattr(torch, storage), compute)


def _cast_rest(module: nn.Module, dtype: torch.dtype) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Cast all other floating-point tensors of `module` to `dtype`; return table, name, old and new tensor of each."""
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
