"""Weights that are loaded together: where modules look them up, their source parameters, and their store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.shared_host_store import KeptRegions, SharedHostStore, SharedRegion
from tightfit.apply.weights.weight_store import WeightStore, plain_parts, rebuilt
from tightfit.devices.memory import copy_with_alignment
from tightfit.measure.modules import compiled_around, find_layers
from tightfit.plan.layer_selection import group_layers, paths_to
from tightfit.schema.footprint import Component
from tightfit.schema.plan import Granularity

__all__ = ["Table", "TensorSlot", "WeightGroup", "behind_gates", "expected_in", "groups_inside", "weight_groups_of"]

Table = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class TensorSlot:
    """An entry of a module's parameters, where a weight is looked up."""

    table: Table
    name: str

    @property
    def found(self) -> torch.Tensor | None:
        return self.table.get(self.name)


@dataclass(eq=False)
class WeightGroup:
    """The source parameters (`source_params`) of some modules, each with the `slots` where modules look it up."""

    name: str
    gates: tuple[nn.Module, ...]  # modules whose forward passes need them; none is inside a compiled one
    source_params: list[nn.Parameter]
    likes: list[torch.Tensor]  # on "meta", with shapes, strides and dtypes of `source_params`
    slots: list[list[TensorSlot]]
    store: WeightStore
    uses: int = 1  # consecutive uses in each call, as far as known
    unused: Collection[str] = ()  # methods of the component that do not use them, as far as known

    @property
    def size(self) -> int:
        return self.store.size

    def views(self, region: torch.Tensor) -> list[nn.Parameter]:
        """Return the weights as views of `region`, to which the store has sent them."""
        # .data: with version counters of their own, which show whether other code wrote to a weight
        plain = [layout.view(region).data for layout in self.store.layouts]
        # same requires_grad, or torch's matmul may choose another kernel (float16 on the CPU, also without gradients)
        return [
            nn.Parameter(rebuilt(source_param, plain), source_param.requires_grad)
            for source_param in self.source_params
        ]

    def keep_up(self) -> bool:
        """Make a new store if other code gave `source_params` other data (`module.to(dtype)`); return whether."""
        if not self.store.writable:
            return False
        plain = self._plain()
        if self.store.holds(plain):
            return False
        self.store, self.likes = self.store.anew(plain), [_like(source_param) for source_param in self.source_params]
        return True

    def unlock_pages(self) -> None:
        """Unlock the source parameters in their current store."""
        self.store.unlock_pages()

    def fill(self, kept: KeptRegions | None = None) -> None:
        """Read the values of the source parameters from their store; with `kept`, leave them in shared memory."""
        if kept is not None and isinstance(self.store, SharedHostStore):
            kept.keep(self.store, self._plain())
            return
        plain = self.store.values()
        for tensor in self._plain():
            tensor.data = copy_with_alignment(plain.pop(0))

    def share(self, region: SharedRegion) -> None:
        """Take the values from `region`, which has the same bytes as the group's buffer in host memory, from now on."""
        store = self.store
        assert isinstance(store, HostStore)
        self.store = SharedHostStore(region, store.layouts, store.device, store.stager)
        for tensor in self._plain():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        store.release()

    def _plain(self) -> list[torch.Tensor]:
        return [part for source_param in self.source_params for part in plain_parts(source_param)]

    def shapes(self, file_weights: FileBackedWeights) -> list[nn.Parameter]:
        """Return "meta" parameters for `source_params`, which are in files; tensor subclasses as they are, empty."""
        stored = iter(self.store.stored)
        found = []
        for source_param, like in zip(self.source_params, self.likes, strict=True):
            where = [next(stored) for _ in plain_parts(source_param)]
            plain = plain_parts(source_param)[0] is source_param
            found.append(file_weights.shape_of(source_param, like, where[0]) if plain else source_param)
        return found

    def put_by_others(self, ours: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and tensor of weights that other code replaced (ids not in `ours`), and put the source back."""
        for index, slots in enumerate(self.slots):
            for slot in slots:
                there = slot.table.get(slot.name)
                if there is not None and id(there) not in ours:
                    yield index, there
                    slot.table[slot.name] = self.source_params[index]

    def show(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Replace `old` weights by `new` ones in the modules; what other code put there is kept."""
        for slots, was, now in zip(self.slots, old, new, strict=True):
            for slot in slots:
                if slot.table.get(slot.name) is was:
                    slot.table[slot.name] = now


def weight_groups_of(
    module: nn.Module,
    component: Component,
    granularity: Granularity,
    make_store: Callable[[list[nn.Parameter]], WeightStore],
    weight_of: Callable[[nn.Parameter], nn.Parameter],
    inside: Mapping[int, nn.Module] = MappingProxyType({}),
    unused: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[WeightGroup]:
    """Return the groups of `module` in the order of the model; `make_store` makes the store of each.

    `weight_of` returns the parameter that replaces a "meta" source parameter.

    `inside`: by id, modules inside another that runs them several times; their weights are needed as long as it runs.
    `unused`: by method, paths of parts that do not run, with all parts inside them.
    """
    layers, groups, around = find_layers(module), [], {**inside, **compiled_around(module)}
    for name, members in group_layers(component, granularity).items():
        parts = [part for layer in members for part in layers[layer]]
        source_params, slots = _params_and_slots(parts)
        owners = parts if name in layers else [module.get_submodule(name)]
        gates = tuple(around.get(id(owner), owner) for owner in owners)
        likes, store = [_like(source_param) for source_param in source_params], make_store(source_params)
        if not store.writable:
            source_params = [
                _emptied(source_param, weight_of(source_param), of)
                for source_param, of in zip(source_params, slots, strict=True)
            ]
        without = [
            method
            for method, parts in unused.items()
            if not any(set(parts).isdisjoint(paths_to(member)) for member in members)
        ]
        uses = min(len(members), len(set(gates)))  # a layer that shares its weights counts once
        groups.append(WeightGroup(name, gates, source_params, likes, slots, store, uses, without))
    return groups


def behind_gates(groups: Iterable[WeightGroup]) -> dict[nn.Module, list[WeightGroup]]:
    """Return the groups that each gate needs."""
    behind: dict[nn.Module, list[WeightGroup]] = {}
    for group in groups:
        for gate in dict.fromkeys(group.gates):
            behind.setdefault(gate, []).append(group)
    return behind


def groups_inside(groups: Iterable[WeightGroup], modules: Iterable[nn.Module]) -> set[WeightGroup]:
    """Return the groups that nothing outside `modules` uses."""
    inside = {part for module in modules for part in module.modules()}
    return {group for group in groups if inside.issuperset(group.gates)}


def expected_in(method: str, groups: Iterable[WeightGroup]) -> Iterator[WeightGroup]:
    """Return the groups that `method` is expected to use, in order: encoding uses no decoder, for example."""
    other = {"encode": "decoder", "decode": "encoder"}.get(method)
    used = (p for p in groups if method not in p.unused and p.name.partition(".")[0] != other)
    return (group for group in used for _ in range(group.uses))


def _params_and_slots(parts: Iterable[nn.Module]) -> tuple[list[nn.Parameter], list[list[TensorSlot]]]:
    """Return the parameters that `parts` own, each once, and all slots of each."""
    source_params: dict[int, nn.Parameter] = {}
    slots: dict[int, list[TensorSlot]] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                source_params[id(parameter)] = parameter
                slots.setdefault(id(parameter), []).append(TensorSlot(part._parameters, name))  # type: ignore[arg-type]
    return list(source_params.values()), list(slots.values())


def _like(source_param: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(source_param.shape, source_param.stride(), dtype=source_param.dtype, device="meta")


def _emptied(source_param: nn.Parameter, weight: nn.Parameter, slots: list[TensorSlot]) -> nn.Parameter:
    """Return `weight`, which is `source_param` or replaces it, without values, and put it into `slots`."""
    if weight is source_param:
        for part in plain_parts(source_param):
            part.data = torch.empty(0, dtype=part.dtype)
    for slot in slots:
        slot.table[slot.name] = weight
    return weight
