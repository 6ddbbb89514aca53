"""Weight groups in host memory: shared with other processes or not, and then page-locked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.shared_host_store import SharedHostStore
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.measure.recorder import Recorder

__all__ = ["HostBytes", "PlacedGroups"]


class HostBytes(NamedTuple):
    """Bytes of weights in host memory."""

    shared: int  # in memory that is shared with other processes
    own: int  # in memory of this process
    locked: int  # of both, page-locked by this process


class PlacedGroups:
    """The weight groups of the components on one device; with `waits`, their pages are locked by `lock` only."""

    def __init__(self, recorder: Recorder, *, waits: bool) -> None:
        self._recorder, self._waits = recorder, waits
        self._groups: dict[str, Sequence[WeightGroup]] = {}
        self._new: dict[str, bool] = {}  # components whose groups wait, and whether their pages are to be locked

    def add(self, name: str, groups: Sequence[WeightGroup], undo: ExitStack, *, pinned: bool) -> None:
        """Add the groups of the component `name`, whose source parameters are to be page-locked if `pinned`."""
        self._groups[name], self._new[name] = groups, pinned
        for group in groups:
            undo.callback(group.unlock_pages)  # of the store that it has by then
        if not self._waits:
            self.lock()

    def new(self) -> dict[str, WeightGroup]:
        """Return the groups for which `lock` was not called, by component and name."""
        return {f"{name}/{group.name}": group for name in self._new for group in self._groups[name]}

    def lock(self) -> None:
        """Page-lock the source parameters of the groups that wait, as far as the system allows."""
        new, self._new = self._new, {}
        for name in (name for name, pinned in new.items() if pinned):
            for count, group in enumerate(self._groups[name]):
                if not group.store.lock_pages():
                    done = f"{count} of {len(self._groups[name])} groups"
                    self._recorder.note(f"{name}: page-locking was refused after {done}")
                    break

    def host_bytes(self) -> HostBytes:
        """Return how much of them is in host memory."""
        stores = [group.store for groups in self._groups.values() for group in groups]
        inside = [store for store in stores if isinstance(store, HostStore)]
        shared = sum(store.size for store in inside if isinstance(store, SharedHostStore))
        locked = sum(store.size for store in inside if store.is_locked)
        return HostBytes(shared, sum(store.size for store in inside) - shared, locked)
