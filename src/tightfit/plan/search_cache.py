"""What was worked out of components, kept from one search to the next."""

from __future__ import annotations

import operator
from collections.abc import Collection

from tightfit.plan.option_search import OptionSet
from tightfit.plan.options import ComponentWorkload, Where
from tightfit.schema.footprint import Footprint
from tightfit.schema.plan import VaePlan

__all__ = ["SearchCache", "SearchCaches", "Visitor"]

Visitor = tuple[str, tuple[int, ...]]  # a component's name, and how many passes it does each time that it comes


class SearchCache:
    """What was worked out of components that work in one way, by their names and visits to the device."""

    def __init__(self) -> None:
        self.tasks: dict[Visitor, ComponentWorkload] = {}
        self.menus: dict[tuple[Visitor, Where, VaePlan], OptionSet] = {}
        self.leasts: dict[tuple[Visitor, Where], int | None] = {}

    def without(self, names: Collection[str]) -> SearchCache:
        """The same without these components."""
        other = SearchCache()
        other.tasks = {visitor: task for visitor, task in self.tasks.items() if visitor[0] not in names}
        other.menus = {key: menu for key, menu in self.menus.items() if key[0][0] not in names}
        other.leasts = {key: least for key, least in self.leasts.items() if key[0][0] not in names}
        return other


class SearchCaches:
    """What was worked out of components in one call on one device, for all searches of it in any bytes of memory.

    They may differ in the room that phases need, in how autoencoders may work and in which ways denoisers may.
    """

    def __init__(self) -> None:
        self._known: dict[int, SearchCache] = {}
        self._passes: list[object] = []
        self._ways: list[object] = []

    def known(self, footprint: Footprint) -> dict[int, SearchCache]:
        """For a search through `footprint`: nothing where it is another call."""
        passes: list[object] = [phase.calls for phase in footprint.phases]
        ways: list[object] = [
            [(way.strip_bytes, way.feature_maps) for way in phase.strip_options] for phase in footprint.phases
        ]
        if len(passes) != len(self._passes) or any(map(operator.is_not, passes, self._passes)):
            self._known = {}
        elif ways != self._ways:
            names = {component.name for component in footprint.components if component.role == "autoencoder"}
            self._known = {number: known.without(names) for number, known in self._known.items()}
        self._passes, self._ways = passes, ways
        return self._known
