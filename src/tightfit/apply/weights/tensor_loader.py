"""Weights that are loaded together from host memory to the device, and evicted.

Loading puts new parameters with device copies into the modules; the originals are left unchanged. Eviction puts the
originals back and copies nothing, except copies that other code changed (e.g. a fused LoRA). Tensors that other code
put into the modules in the meantime are kept, and loaded next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from tightfit.apply.weights.gradients import Links
from tightfit.apply.weights.loaded_group import Seen
from tightfit.apply.weights.offloaded_parameter import OffloadedParameter
from tightfit.apply.weights.weight_store import (
    HOST,
    forget_casts,
    plain_parts,
    rebuilt,
    relocate,
    version_of,
    write_back,
)
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder

__all__ = ["TensorLoader"]


class _Slot(NamedTuple):
    """An entry of a module's parameters or buffers, its original and its device copy."""

    table: dict[str, torch.Tensor | None]
    name: str
    original: torch.Tensor
    copy: torch.Tensor
    version: tuple[Any, ...]


class TensorLoader:
    """Loads all parameters and buffers of `module`, except those that `without()` returns at that time."""

    # the copies of all loaders by id, while they are loaded: components may contain each other
    _loaded: ClassVar[WeakValueDictionary[int, torch.Tensor]] = WeakValueDictionary()

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        recorder: Recorder,
        without: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self._module = module
        self._device = device
        self._recorder = recorder
        self._without = without
        self._slots: list[_Slot] = []
        self._bytes = 0
        self.is_loaded = False

    def load(self) -> None:
        """Copy every tensor to the device and put the copies into the modules."""
        if self.is_loaded:
            return
        self._slots = self._copies()
        self.is_loaded = True
        for slot in self._slots:
            slot.table[slot.name] = slot.copy
            self._loaded[id(slot.copy)] = slot.copy
        self._bytes = sum({id(slot.copy): slot.copy.nbytes for slot in self._slots}.values())
        self._recorder.hold(self, self._bytes)
        self._recorder.moved(bytes_in=self._bytes)

    def _copies(self) -> list[_Slot]:
        copies: dict[int, torch.Tensor] = {}
        slots = []
        with self._recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
            for table, name, original in self._tensors():
                copy = copies.get(id(original))
                if copy is None:
                    copy = copies[id(original)] = self._copy(original)
                slots.append(_Slot(table, name, original, copy, version_of(copy)))
        return slots

    def link(self) -> Links:
        """Make the copies functions of their originals, which get the gradients, until `undo` of what this returns."""
        links = Links()
        seen: dict[int, list[Seen]] = {}
        for slot in self._slots:
            if isinstance(slot.original, nn.Parameter) and slot.table.get(slot.name) is slot.copy:
                seen.setdefault(id(slot.original), []).append((slot.table, slot.name, slot.copy))
        originals = {id(slot.original): slot.original for slot in self._slots}
        for key, places in seen.items():
            links.add(originals[key], places)
        return links

    def evict(self, *, compare: bool = False) -> None:
        """Put the originals back into the modules and free the copies.

        `compare` their values: writes to `weight.data`, as of a fused LoRA, are not counted by torch.
        """
        for table, name, original, copy, version in self._slots:
            if table.get(name) is not copy:
                continue  # replaced by other code while it was loaded: keep that
            changed = version_of(copy) != version or (compare and self._differ(copy.data, original))
            if changed:  # e.g. a LoRA was fused in a callback, or the dtype changed
                with torch.no_grad(), self._recorder.uncounted():
                    write_back(original, copy.data, self._device)
                self._recorder.moved(bytes_out=copy.nbytes)
            table[name] = original
        self._move_to_host({id(slot.original) for slot in self._slots})
        for slot in self._slots:
            self._loaded.pop(id(slot.copy), None)
        self._slots = []
        forget_casts()
        self._recorder.hold(self, 0)
        self.is_loaded = False  # last, so that an interrupted eviction is repeated

    def _differ(self, copy: torch.Tensor, original: torch.Tensor) -> bool:
        if type(copy) is not torch.Tensor or original.is_meta:
            return False
        with self._recorder.uncounted():
            stored = self._device.to_host(copy)  # a simulated card may have only shapes
        return not stored.is_meta and not torch.equal(stored, original.to(stored.device))

    def _move_to_host(self, originals: set[int]) -> None:
        """Move tensors that other code put on the device in place of weights to host memory."""
        target = self._device.torch_device
        moved: dict[int, torch.Tensor] = {}
        for table, name, tensor in self._tensors() if target != HOST else ():
            own = id(tensor) in originals or id(tensor) in self._loaded
            if own or tensor.device != target or isinstance(tensor, OffloadedParameter):
                continue
            if id(tensor) not in moved:
                moved[id(tensor)] = self._in_host_memory(tensor)
            table[name] = moved[id(tensor)]

    def _in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, moved, where its device allows that, else a new one."""
        self._recorder.moved(bytes_out=tensor.nbytes)
        with torch.inference_mode(False), torch.no_grad(), self._recorder.uncounted():
            if not self._device.swaps_parameters:
                relocate(tensor, HOST)
                return tensor
            stored = rebuilt(tensor, [self._device.to_host(part) for part in plain_parts(tensor.detach())])
        return nn.Parameter(stored, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stored

    def _copy(self, original: torch.Tensor) -> torch.Tensor:
        copy = rebuilt(original, [self._device.to_device(part) for part in plain_parts(original.detach())])
        if isinstance(original, nn.Parameter):
            return nn.Parameter(copy, requires_grad=original.requires_grad)
        return copy

    def _tensors(self) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
        without = set(map(id, self._without()))
        for module in self._module.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) not in without:
                        yield table, name, tensor  # type: ignore[misc]
