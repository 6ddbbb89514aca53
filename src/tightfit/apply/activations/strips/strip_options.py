"""A call of an autoencoder's method → how else it could be done, in strips: what each way takes, and what it does."""

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

PAGES = 20 * 2**20  # bytes that an allocator may hold beside what else is there


class StripOptionProfiler:
    """How else a call of an autoencoder's method could be done: one item of a batch at a time, in strips."""

    def __init__(self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of `module.method(*args, **kwargs)`. Raises NotTakenApart."""
        first, *others = args
        count = len(first)
        alone = lambda x: x[:1] if isinstance(x, torch.Tensor) and x.ndim and len(x) == count else x  # noqa: E731
        layers, form = tree_flatten(tree_map(alone, (tuple(others), kwargs)))  # as a call has them: its program is kept
        self._program, self.mark, _ = program_of(module, type(module), method, first[:1], layers, form)
        self._items, self._trials, self._stores = count, OpCostCache(), _stores_of(module)

    @property
    def operations(self) -> int:
        """How many there are to be done in strips."""
        return len(self._program.nodes)

    def way(
        self, strips: int, maps: FeatureMaps, beside: int, outside: int, *, expandable: bool = True
    ) -> StripProfile | None:
        """It with `strips` bytes for strips and maps waiting where they are said to; None where none would wait there.

        `beside` bytes more are there all along, and `outside` bytes before or after. Segments of the allocator grow if
        it is `expandable`.
        """
        strip_plan = Strips(self._program, strips, maps, self.mark, moves=True).strip_plan
        if maps == "host" and not strip_plan.in_host:
            return None
        made = (self._items - 1) * sum(self._program.nodes[index].bytes for index in self._program.outputs)
        room = max(beside + made + max(strip_plan.room(expandable=expandable), strips), outside) + PAGES
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
    """The leaf that each module is of, by paths."""
    layers = {id(part): layer for layer, parts in find_layers(module).items() for part in parts}
    return {path: layers[id(part)] for path, part in module.named_modules() if id(part) in layers}
