"""Results computed for components, kept from one search to the next."""

from __future__ import annotations

import operator
from collections.abc import Collection

from tightfit.plan.option_search import OptionSet
from tightfit.plan.options import ComponentWorkload, WeightLocation
from tightfit.schema.footprint import Footprint
from tightfit.schema.plan import VaePlan

__all__ = ["SearchCache", "SearchCaches", "Visitor"]

Visitor = tuple[str, tuple[int, ...]]  # a component's name, and its number of calls each time that it is loaded


class SearchCache:
    """Workloads, options and least bytes of components in one variant, by their names and visits to the device."""

    def __init__(self) -> None:
        self.tasks: dict[Visitor, ComponentWorkload] = {}
        self.menus: dict[tuple[Visitor, WeightLocation, VaePlan], OptionSet] = {}
        self.leasts: dict[tuple[Visitor, WeightLocation], int | None] = {}

    def without(self, names: Collection[str]) -> SearchCache:
        """Return a copy without the results of the components `names`."""
        other = SearchCache()
        other.tasks = {visitor: task for visitor, task in self.tasks.items() if visitor[0] not in names}
        other.menus = {key: menu for key, menu in self.menus.items() if key[0][0] not in names}
        other.leasts = {key: least for key, least in self.leasts.items() if key[0][0] not in names}
        return other


class SearchCaches:
    """Caches of one pipeline call on one device, for all searches over it with any memory limits.

    These may differ in the bytes that phases need, in the strip options of autoencoders and in denoiser variants.
    """

    def __init__(self) -> None:
        self._known: dict[int, SearchCache] = {}
        self._passes: list[object] = []
        self._ways: list[object] = []

    def known(self, footprint: Footprint) -> dict[int, SearchCache]:
        """Return the caches for a search over `footprint`, by variant number; empty if it is of another call."""
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
