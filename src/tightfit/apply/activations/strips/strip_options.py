"""A call of an autoencoder's method → its strip options: the memory that each takes, and its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.apply.activations.strips.cost_estimate import profile_stages
from tightfit.apply.activations.strips.executor import program_of
from tightfit.apply.activations.strips.op_costs import OpCostCache
from tightfit.apply.activations.strips.strip_config import StripConfig as Strips
from tightfit.measure.modules import find_layers
from tightfit.schema.footprint import FeatureMaps, StripProfile

__all__ = ["StripOptionProfiler"]

PAGES = 20 * 2**20  # bytes that an allocator may hold on top


class StripOptionProfiler:
    """Profiles of a call of an autoencoder's method in strips, one item of the batch at a time."""

    def __init__(self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare `module.method(*args, **kwargs)`. Raises UnsupportedGraph."""
        first, *others = args
        count = len(first)
        alone = lambda x: x[:1] if isinstance(x, torch.Tensor) and x.ndim and len(x) == count else x  # noqa: E731
        layers, form = tree_flatten(tree_map(alone, (tuple(others), kwargs)))  # as in a call: its cache key
        self._program, self.mark, _ = program_of(module, type(module), method, first[:1], layers, form)
        self._items, self._trials, self._stores = count, OpCostCache(), _stores_of(module)

    @property
    def operations(self) -> int:
        """Number of operations to run in strips."""
        return len(self._program.nodes)

    def profile(
        self, strips: int, maps: FeatureMaps, beside: int, outside: int, *, expandable: bool = True
    ) -> StripProfile | None:
        """Return the profile with `strips` bytes for strips and kept `maps`; None if "host" would keep no map there.

        `beside` more bytes are allocated all along, and `outside` bytes before or after. With `expandable`, the
        allocator's segments are expandable.
        """
        strip_plan = Strips(self._program, strips, maps, self.mark, moves=True).strip_plan
        if maps == "host" and not strip_plan.in_host:
            return None
        made = (self._items - 1) * sum(self._program.nodes[index].bytes for index in self._program.outputs)
        room = max(beside + made + max(strip_plan.allocator_bytes(expandable=expandable), strips), outside) + PAGES
        with self._trials.working():
            stages = tuple(profile_stages(strip_plan, self._trials, self._stores))
        return StripProfile(
            strip_bytes=strips,
            feature_maps=maps,
            allocator_bytes=room,
            host_bytes=strip_plan.peak.host,
            batch_items=self._items,
            stages=stages,
        )


def _stores_of(module: nn.Module) -> dict[str, str]:
    """Map the path of each module to the path of the layer that it belongs to."""
    layers = {id(part): layer for layer, parts in find_layers(module).items() for part in parts}
    return {path: layers[id(part)] for path, part in module.named_modules() if id(part) in layers}
