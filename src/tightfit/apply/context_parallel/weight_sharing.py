"""One copy of offloaded weights in host memory for all ranks of a computer.

Each rank has first placed its own. Of a group of weights that several ranks have, in the same layout, the lowest rank
writes its bytes to a file in memory. The others compare them with their own and, where they are equal, free theirs.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.weight_samples import differing_components
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.shared_host_store import SharedRegion
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.memory_file import PAGE_SIZE, MemoryFile
from tightfit.devices.ram import computer_mark, ram_free
from tightfit.units import format_bytes

__all__ = ["WeightSharing", "teams_of"]

logger = logging.getLogger("tightfit")

CHUNK = 256 * 2**20  # bytes that are in memory once more while they are shared
TOKEN = 16  # bytes
_COMPONENT, _DIGEST, _SIZE = 8, 16, 8  # bytes of the parts of a key: digests of component and layout, size


@dataclass
class WeightSharing:
    """Which ranks of `group` share weights with each other: `teams`, each in ascending order, of one rank or more."""

    group: RankGroup
    teams: tuple[tuple[int, ...], ...]
    refused: str = ""  # why this rank shares none, or fewer than it could
    differing: tuple[str, ...] = ()  # components of which ranks have different weights

    @classmethod
    def among(cls, group: RankGroup) -> WeightSharing:
        """Find out which ranks can open each other's memory, and how many are on this computer. Collective."""
        token = os.urandom(TOKEN)
        try:
            own, refused = MemoryFile.create(TOKEN), ""
            own.write(token)
            address = own.address
        except OSError as error:
            address, refused = "", f"no file in memory can be made: {error.strerror or error}"
        with group.call():
            said = [text.split("\n") for text in group.all_gather_text(f"{computer_mark()}\n{address}\n{token.hex()}")]
            reached, why = [], refused
            for rank, (computer, there, expected) in enumerate(said):
                if computer != computer_mark():
                    reached.append(False)
                    continue
                unread = _cannot_read(there, expected)
                reached.append(not unread)
                if unread:
                    why = why or f"rank {rank}'s memory cannot be opened: {unread}"
            rows = group.all_gather(torch.tensor(reached, dtype=torch.uint8))
        group.ranks_here = sum(computer == computer_mark() for computer, *_ in said)
        teams = teams_of([[bool(each) for each in row.tolist()] for row in rows])
        (team,) = (team for team in teams if group.rank in team)
        return cls(group, teams, why if len(team) < group.ranks_here else "")

    def compare(self, components: Mapping[str, nn.Module]) -> None:
        """Name in the log which `components`, by name, have different weights on different ranks. Collective."""
        self._note_differing(differing_components(self.group, components))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that share weights with this one, and this one."""
        return next(team for team in self.teams if self.group.rank in team)

    def share(self, groups: Mapping[str, WeightGroup]) -> bool:
        """Take the values of `groups`, by name, from shared memory where other ranks have the same. Collective.

        Names begin with the component's, before a "/". Return whether any rank had groups; else nothing was sent but
        that. Groups that this rank alone has, or with other values than the first rank that has them, stay as they are.
        """
        with self.group.call():
            by_key = {_key(name, group): (name, group) for name, group in groups.items() if _can_share(group)}
            offers = [_cut(data) for data in self.group.all_gather_bytes(b"".join(by_key))]
            if not any(offers):
                return False
            layouts = [_FileLayout.of({rank: offers[rank] for rank in team}) for team in self.teams]
            layout = next(each for team, each in zip(self.teams, layouts, strict=True) if self.group.rank in team)
            files, goes_on = self._opened(layout), True
            differing: dict[str, None] = {}
            for number in range(max(len(each.chunks) for each in layouts)):
                chunk = layout.chunks[number] if files and goes_on and number < len(layout.chunks) else []
                written = self._written(files, [each for each in chunk if each.ranks[0] == self.group.rank], by_key)
                goes_on = goes_on and written  # what was shared so far stays shared
                for place in chunk if written else ():
                    if self.group.rank in place.ranks:
                        name, group = by_key[place.key]
                        if not self._taken(group, place.within(files), place.ranks[0]):
                            differing[name.partition("/")[0]] = None
            said = self.group.all_gather_text("\n".join(differing))
            self._note_differing([name for text in said for name in text.split("\n") if name])
            return True

    def _note_differing(self, components: Iterable[str]) -> None:
        new = tuple(name for name in dict.fromkeys(components) if name not in self.differing)
        self.differing += new
        if new:
            logger.warning("ranks have different weights of %s: what they draw is a mixture", ", ".join(new))

    def _opened(self, layout: _FileLayout) -> dict[bytes, MemoryFile]:
        """Return the file of this rank's team for each component; none if one of the ranks cannot open all."""
        first, own, why = self.ranks[0], self.group.rank, ""
        files: dict[bytes, MemoryFile] = {}
        try:
            if own == first:
                files = {component: MemoryFile.create(size) for component, size in layout.sizes.items()}
        except OSError as error:
            why = f"{format_bytes(sum(layout.sizes.values()))} of memory were refused: {error.strerror or error}"
        addresses = self.group.all_gather_text("\n".join(file.address for file in files.values()))[first]
        try:
            if addresses and own != first:
                opened = [MemoryFile.open(address) for address in addresses.split("\n")]
                files = dict(zip(layout.sizes, opened, strict=True))
        except OSError as error:
            why = f"rank {first}'s memory cannot be opened: {error.strerror or error}"
        return files if self._all_can(why) else {}

    def _written(
        self, files: Mapping[bytes, MemoryFile], own: Sequence[_SharedBytes],
        by_key: Mapping[bytes, tuple[str, WeightGroup]],
    ) -> bool:  # fmt: skip
        """Write this rank's part of a chunk; return whether all ranks of the team wrote theirs."""
        size, free = sum(place.size for place in own), ram_free()
        if size > free:
            return self._all_can(f"sharing takes {format_bytes(size)} more for a moment, of {format_bytes(free)} free")
        for place in own:
            place.within(files).data.copy_(_buffer(by_key[place.key][1]))
        return self._all_can("")

    def _all_can(self, why: str) -> bool:
        """Whether no rank of this one's team says `why` it cannot go on."""
        texts = self.group.all_gather_text(why)
        refused = next((f"rank {rank}: {texts[rank]}" for rank in self.ranks if texts[rank]), "")
        self.refused = refused or self.refused
        return not refused

    def _taken(self, group: WeightGroup, region: SharedRegion, writer: int) -> bool:
        """Take the values of `group` from `region` if they are those of the `writer`; return whether."""
        if self.group.rank != writer and not torch.equal(region.data, _buffer(group)):
            return False
        group.share(region)
        return True

    def described(self, shared: int, own: int, locked: int) -> list[str]:
        """Return sentences for a report: `shared` and `own` bytes in host memory, of which `locked` are page-locked."""
        head, ranks = f"rank {self.group.rank} of {self.group.size}", len(self.ranks)
        said = []
        if shared:
            said.append(f"{head}: {format_bytes(shared)} of weights in host memory are one copy for {ranks} ranks")
        if own and self.refused:
            said.append(f"{head}: {format_bytes(own)} of weights in host memory are a copy of its own: {self.refused}")
        if self.differing:
            said.append(f"ranks have different weights of {', '.join(self.differing)}: each keeps, and uses, its own")
        if locked:
            said.append(f"{head}: {format_bytes(locked)} of weights in host memory are page-locked by this rank")
        return said


@dataclass(frozen=True)
class _SharedBytes:
    """Where in the file of their component the bytes with a `key` are; `ranks` have them, the first writes them."""

    key: bytes
    offset: int
    size: int
    ranks: tuple[int, ...]

    def within(self, files: Mapping[bytes, MemoryFile]) -> SharedRegion:
        return SharedRegion(files[self.key[:_COMPONENT]], self.offset, self.size)


@dataclass(frozen=True)
class _FileLayout:
    """What several ranks of a team have: `sizes` in bytes of their files by component, shared one chunk after another.

    A file for each component: as long as one plan's stores need any of it, all of it takes memory.
    """

    sizes: Mapping[bytes, int]
    chunks: Sequence[Sequence[_SharedBytes]]

    @classmethod
    def of(cls, offers: Mapping[int, Sequence[bytes]]) -> _FileLayout:
        """Return the layout for what ranks have, by rank in ascending order. All ranks find the same."""
        having: dict[bytes, list[int]] = {}
        for rank, keys in offers.items():
            for key in keys:
                having.setdefault(key, []).append(rank)
        sizes: dict[bytes, int] = {}
        chunks: list[list[_SharedBytes]] = []
        filled = 0
        for key, ranks in having.items():
            size = int.from_bytes(key[-_SIZE:], "little")
            if len(ranks) == 1 or not size:
                continue
            if not chunks or filled + size > CHUNK:
                chunks.append([])
                filled = 0
            component, filled = key[:_COMPONENT], filled + size
            end = sizes.get(component, 0)
            chunks[-1].append(_SharedBytes(key, end, size, tuple(ranks)))
            sizes[component] = end + -(-size // PAGE_SIZE) * PAGE_SIZE  # ranges that are locked have no page in common
        return cls(sizes, chunks)


def teams_of(reached: Sequence[Sequence[bool]]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that reach each other, all of a team; `reached[a][b]`: whether a reaches b."""
    every = range(len(reached))
    mutual = [{a} | {b for b in every if reached[a][b] and reached[b][a]} for a in every]
    return tuple(dict.fromkeys(
        tuple(sorted(mutual[rank])) if all(mutual[other] == mutual[rank] for other in mutual[rank]) else (rank,)
        for rank in every
    ))  # fmt: skip


def _cannot_read(address: str, expected: str) -> str:
    """Return why the file in memory at `address` cannot be read; "" if it can, and has the `expected` token."""
    if not address:
        return "there is none"
    try:
        found = MemoryFile.open(address).read(TOKEN).hex()
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return "" if found == expected else "it is that of another process"


def _key(name: str, group: WeightGroup) -> bytes:
    """Return what two ranks' groups have in common that may have the same bytes."""
    layouts = [(each.offset, each.dtype, each.shape, each.strides) for each in group.store.layouts]
    component, layout = name.partition("/")[0], f"{name}\n{layouts}"
    parts = hashlib.sha256(component.encode()).digest()[:_COMPONENT], hashlib.sha256(layout.encode()).digest()[:_DIGEST]
    return b"".join(parts) + group.store.size.to_bytes(_SIZE, "little")


def _cut(data: bytes) -> list[bytes]:
    length = _COMPONENT + _DIGEST + _SIZE
    return [data[at : at + length] for at in range(0, len(data), length)]


def _can_share(group: WeightGroup) -> bool:
    """Whether it is in a buffer of this process, and no optimizer has its weights."""
    trained = any(source_param.grad is not None for source_param in group.source_params)
    return type(group.store) is HostStore and not trained and not _buffer(group).is_meta


def _buffer(group: WeightGroup) -> torch.Tensor:
    assert isinstance(group.store, HostStore)
    return group.store.buffer
