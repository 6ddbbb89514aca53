"""Weights that are loaded together: where modules look them up, their source parameters, and their store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from tightfit.apply.weights.file_weights import FileBackedWeights
from tightfit.apply.weights.weight_store import WeightStore, plain_parts, rebuilt
from tightfit.devices.memory import copy_with_alignment
from tightfit.measure.modules import compiled_around, find_layers
from tightfit.plan.layer_selection import group_layers, paths_to
from tightfit.schema.footprint import Component
from tightfit.schema.plan import Granularity

__all__ = ["Table", "TensorSlot", "WeightGroup", "behind_gates", "expected_in", "weight_groups_of"]

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
    """The source parameters (`masters`) of some modules, each with the `places` where modules look it up."""

    name: str
    gates: tuple[nn.Module, ...]  # modules whose forward passes need them; none is inside a compiled one
    masters: list[nn.Parameter]
    likes: list[torch.Tensor]  # on "meta", with shapes, strides and dtypes of `masters`
    places: list[list[TensorSlot]]
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
        return [nn.Parameter(rebuilt(master, plain), master.requires_grad) for master in self.masters]

    def keep_up(self) -> bool:
        """Make a new store if other code gave `masters` other data (e.g. `module.to(dtype)`); return whether it did."""
        if not self.store.writable:
            return False
        plain = [part for master in self.masters for part in plain_parts(master)]
        if self.store.holds(plain):
            return False
        self.store, self.likes = self.store.anew(plain), [_like(master) for master in self.masters]
        return True

    def unlock_pages(self) -> None:
        """Unlock the source parameters in their current store."""
        self.store.unlock_pages()

    def fill(self) -> None:
        """Read the values of the source parameters from their store."""
        plain = self.store.values()
        for tensor in (part for master in self.masters for part in plain_parts(master)):
            tensor.data = copy_with_alignment(plain.pop(0))

    def shapes(self, file_weights: FileBackedWeights) -> list[nn.Parameter]:
        """Return "meta" parameters for `masters`, which are in files; tensor subclasses as they are, empty."""
        stored = iter(self.store.stored)
        found = []
        for master, like in zip(self.masters, self.likes, strict=True):
            where = [next(stored) for _ in plain_parts(master)]
            plain = plain_parts(master)[0] is master
            found.append(file_weights.shape_of(master, like, where[0]) if plain else master)
        return found

    def put_by_others(self, ours: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and tensor of weights that other code replaced (ids not in `ours`), and put `masters` back."""
        for index, places in enumerate(self.places):
            for place in places:
                there = place.table.get(place.name)
                if there is not None and id(there) not in ours:
                    yield index, there
                    place.table[place.name] = self.masters[index]

    def show(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Replace `old` weights by `new` ones in the modules; what other code put there is kept."""
        for places, was, now in zip(self.places, old, new, strict=True):
            for place in places:
                if place.table.get(place.name) is was:
                    place.table[place.name] = now


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
        masters, places = _places_of(parts)
        owners = parts if name in layers else [module.get_submodule(name)]
        gates = tuple(around.get(id(owner), owner) for owner in owners)
        likes, store = [_like(master) for master in masters], make_store(masters)
        if not store.writable:
            masters = [_emptied(master, weight_of(master), of) for master, of in zip(masters, places, strict=True)]
        without = [
            method
            for method, parts in unused.items()
            if not any(set(parts).isdisjoint(paths_to(member)) for member in members)
        ]
        uses = min(len(members), len(set(gates)))  # a layer that shares its weights counts once
        groups.append(WeightGroup(name, gates, masters, likes, places, store, uses, without))
    return groups


def behind_gates(groups: Iterable[WeightGroup]) -> dict[nn.Module, list[WeightGroup]]:
    """Return the groups that each gate needs."""
    behind: dict[nn.Module, list[WeightGroup]] = {}
    for group in groups:
        for gate in dict.fromkeys(group.gates):
            behind.setdefault(gate, []).append(group)
    return behind


def expected_in(method: str, groups: Iterable[WeightGroup]) -> Iterator[WeightGroup]:
    """Return the groups that `method` is expected to use, in order: encoding uses no decoder, for example."""
    other = {"encode": "decoder", "decode": "encoder"}.get(method)
    used = (p for p in groups if method not in p.unused and p.name.partition(".")[0] != other)
    return (group for group in used for _ in range(group.uses))


def _places_of(parts: Iterable[nn.Module]) -> tuple[list[nn.Parameter], list[list[TensorSlot]]]:
    """Return the parameters that `parts` own, each once, and all places of each."""
    masters: dict[int, nn.Parameter] = {}
    places: dict[int, list[TensorSlot]] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                masters[id(parameter)] = parameter
                places.setdefault(id(parameter), []).append(TensorSlot(part._parameters, name))  # type: ignore[arg-type]
    return list(masters.values()), list(places.values())


def _like(master: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(master.shape, master.stride(), dtype=master.dtype, device="meta")


def _emptied(master: nn.Parameter, weight: nn.Parameter, places: list[TensorSlot]) -> nn.Parameter:
    """Return `weight`, which is `master` or replaces it, without values, and put it into `places`."""
    if weight is master:
        for part in plain_parts(master):
            part.data = torch.empty(0, dtype=part.dtype)
    for place in places:
        place.table[place.name] = weight
    return weight
