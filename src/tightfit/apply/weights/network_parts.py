"""The parts of a network that is split over devices: the modules of each."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tightfit.errors import PlanError
from tightfit.measure.modules import find_blocks, has_skips, inspect_component
from tightfit.plan.network_parts import block_order, part_finder, part_of
from tightfit.schema.footprint import Component
from tightfit.schema.plan import ComponentPlan

__all__ = ["PartView", "blocks_of", "inspect_part", "network_of", "part_views"]


class PartView(nn.Module):
    """The modules of one part of `network`, by their paths there, as they are whenever this is asked."""

    def __init__(self, network: nn.Module, chosen: ComponentPlan, index: int) -> None:
        super().__init__()
        self._networks, self._chosen, self._index = (network,), chosen, index  # in a tuple: it is not a submodule
        order = block_order(find_blocks(network), has_skips=has_skips(network))
        self._find = part_finder(order, chosen.split.values())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the paths and modules of the part; nn.Module makes `modules`, `parameters` and `buffers` of it."""
        for path, module in self.network.named_modules(memo, "", remove_duplicate):
            if self.has(path):
                yield ".".join(filter(None, (prefix, path))), module

    @property
    def network(self) -> nn.Module:
        """The network that it is a part of."""
        return self._networks[0]

    def has(self, path: str) -> bool:
        """Whether the module at `path` of the network is in this part."""
        return self._find(path) == self._index

    def of(self, component: Component) -> Component:
        """Return the record of this part of `component`."""
        return part_of(component, self._chosen, self._index)


def part_views(name: str, network: nn.Module, chosen: ComponentPlan) -> list[PartView]:
    """Return the parts of `network`, the component `name`. Raises PlanError where two of them share a weight."""
    views = [PartView(network, chosen, index) for index in range(len(chosen.split) + 1)]
    owners: dict[int, tuple[int, str]] = {}
    for index, view in enumerate(views):
        for path, weight in view.named_parameters(remove_duplicate=False):
            other, first = owners.setdefault(id(weight), (index, path))
            if other != index:
                raise PlanError(
                    f"{name}: {first} and {path} are one weight, and split puts them on two devices: begin the part "
                    "elsewhere",
                    name=path,
                )
    return views


def network_of(module: nn.Module) -> nn.Module:
    """Return the network of which `module` is a part; itself if it is none."""
    return module.network if isinstance(module, PartView) else module


def inspect_part(name: str, module: nn.Module) -> Component:
    """Return the record of the component `name`, or of the part of it that `module` is."""
    component = inspect_component(name, network_of(module))
    return module.of(component) if isinstance(module, PartView) else component


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a network, or of the part of it that `module` is, by path."""
    found = find_blocks(network_of(module))
    return {path: block for path, block in found.items() if not isinstance(module, PartView) or module.has(path)}
