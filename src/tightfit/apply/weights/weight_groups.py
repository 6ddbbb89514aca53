"""Weights that move together: where modules look them up, what stands there meanwhile, and their home."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from tightfit.apply.weights.disk_store import DiskStore
from tightfit.apply.weights.file_weights import FileBackedWeights
from tightfit.apply.weights.weight_store import HostStore, WeightStore, plain_parts, rebuilt
from tightfit.devices.memory import copy_alike
from tightfit.measure.modules import compiled_around, find_layers
from tightfit.plan.layer_selection import group_layers, paths_to
from tightfit.schema.footprint import Component
from tightfit.schema.plan import Granularity

__all__ = ["Table", "TensorSlot", "WeightGroup", "behind_gates", "expected_in", "weight_groups_of"]

Table = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class TensorSlot:
    """One place in a module where a weight is looked up."""

    table: Table
    name: str

    @property
    def found(self) -> torch.Tensor | None:
        return self.table.get(self.name)


@dataclass(eq=False)
class WeightGroup:
    """The weights of some modules, `masters`, each with the places where it is looked up."""

    name: str
    gates: tuple[nn.Module, ...]  # whose forward passes need them; none is inside of what is compiled
    masters: list[nn.Parameter]
    likes: list[torch.Tensor]  # on "meta", laid out as the masters are
    places: list[list[TensorSlot]]
    store: WeightStore
    uses: int = 1  # one after another in each pass, as far as that is known
    unused: Collection[str] = ()  # methods of the component in which they have no work, as far as that is known

    @property
    def size(self) -> int:
        return self.store.size

    def views(self, region: torch.Tensor) -> list[nn.Parameter]:
        """The weights as they lie in `region`, where the home has sent them."""
        # .data: with version counters of their own, which say whether somebody wrote into a weight
        plain = [layout.view(region).data for layout in self.store.layouts]
        # as its master, or torch's matmul may choose another kernel (float16 on the CPU, also without gradients)
        return [nn.Parameter(rebuilt(master, plain), master.requires_grad) for master in self.masters]

    def keep_up(self) -> bool:
        """Looks whether somebody gave masters other data (`module.to(dtype)`, say), and moves house; whether it did."""
        if not isinstance(self.store, HostStore):
            return False
        plain = [part for master in self.masters for part in plain_parts(master)]
        if self.store.holds(plain):
            return False
        self.store, self.likes = self.store.anew(plain), [_like(master) for master in self.masters]
        return True

    def unlock_pages(self) -> None:
        """Unlocks the masters, in whatever home they are by now."""
        self.store.unlock_pages()

    def fill(self) -> None:
        """The masters have values again, read from their home."""
        plain = self.store.values()
        for tensor in (part for master in self.masters for part in plain_parts(master)):
            tensor.data = copy_alike(plain.pop(0))

    def shapes(self, file_weights: FileBackedWeights) -> list[nn.Parameter]:
        """What stands for the masters, which are on the disk; those in a format of their own as they are, empty."""
        assert isinstance(self.store, DiskStore)
        stored = iter(self.store.stored)
        found = []
        for master, like in zip(self.masters, self.likes, strict=True):
            where = [next(stored) for _ in plain_parts(master)]
            plain = plain_parts(master)[0] is master
            found.append(file_weights.shape_of(master, like, where[0]) if plain else master)
        return found

    def put_by_others(self, ours: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """What others put where weights are looked up (not by id among `ours`), with the number of the weight."""
        for index, places in enumerate(self.places):
            for place in places:
                there = place.table.get(place.name)
                if there is not None and id(there) not in ours:
                    yield index, there
                    place.table[place.name] = self.masters[index]

    def show(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Where modules look `old` weights up, they find the `new` ones; what others put there stays."""
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
    """The groups of `module` in the order of the model; `make_store` finds a home for the masters of each.

    A master that is only a shape is what `weight_of` says.

    Weights of modules whose ids are `inside` another, which works them several times over, stay as long as that works.
    For methods by name, some parts are `unused`, with all that is inside of them.
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
        uses = min(len(members), len(set(gates)))  # a layer that shares its weights with another is in use once
        groups.append(WeightGroup(name, gates, masters, likes, places, store, uses, without))
    return groups


def behind_gates(groups: Iterable[WeightGroup]) -> dict[nn.Module, list[WeightGroup]]:
    """Which groups each gate needs."""
    behind: dict[nn.Module, list[WeightGroup]] = {}
    for group in groups:
        for gate in dict.fromkeys(group.gates):
            behind.setdefault(gate, []).append(group)
    return behind


def expected_in(method: str, groups: Iterable[WeightGroup]) -> Iterator[WeightGroup]:
    """What `method` is guessed to use: an autoencoder's decoder has no part in encoding."""
    other = {"encode": "decoder", "decode": "encoder"}.get(method)
    used = (p for p in groups if method not in p.unused and p.name.partition(".")[0] != other)
    return (group for group in used for _ in range(group.uses))


def _places_of(parts: Iterable[nn.Module]) -> tuple[list[nn.Parameter], list[list[TensorSlot]]]:
    """The parameters that `parts` own, each once, and all places of each."""
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
    """`weight`, which is `master` or takes its place, without values."""
    if weight is master:
        for part in plain_parts(master):
            part.data = torch.empty(0, dtype=part.dtype)
    for place in places:
        place.table[place.name] = weight
    return weight
