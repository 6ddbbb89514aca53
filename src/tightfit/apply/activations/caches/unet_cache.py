"""Step caches in a U-Net: in a skipped step, all but the outermost blocks on both sides are left out.

The last up blocks need what the first down blocks return, and what the up block before them returned in an earlier
step: that is kept (DeepCache, arXiv:2312.00858). The network's own code in between gets tensors of one repeated zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tightfit.apply.activations.caches.block_cache import SkippableBlocks
from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.errors import CacheError
from tightfit.schema.step_cache import StepCache

__all__ = ["UnetCache", "deep_blocks"]


def deep_blocks(name: str, network: nn.Module, settings: StepCache) -> SkippableBlocks:
    """Return the blocks of the U-Net `network`, the component `name`. Raises CacheError if none can be skipped."""
    down, up = list(network.down_blocks), list(network.up_blocks)  # type: ignore[arg-type]
    outer = max(settings.value("first_blocks"), settings.value("last_blocks"), 1)
    outer = min(outer, len(down) - 1) if settings.first_blocks is None and settings.last_blocks is None else outer
    middle = getattr(network, "mid_block", None)
    deep = [*down[outer:], *([middle] if isinstance(middle, nn.Module) else []), *up[: len(up) - outer]]
    if not 0 < outer < min(len(down), len(up)):
        raise CacheError(
            f"cache={settings.strategy} leaves no block of {name} to be skipped: of its {len(down)} down blocks and "
            f"{len(up)} up blocks, the {outer} outermost run in every step",
            component=name,
        )
    return SkippableBlocks(tuple(down[:outer]), tuple(deep))


class UnetCache(BranchCache):
    """Leaves out the deep blocks of a U-Net."""

    def __init__(
        self, blocks: SkippableBlocks, settings: StepCache, host_pool: ActivationHostPool | None, leave_out: LeaveOut
    ) -> None:
        super().__init__(settings, host_pool, leave_out)
        self.blocks = blocks
        self._kept = KeptTensors(settings.value("order") or 0, host_pool)
        self._forms: dict[nn.Module, Any] = {}  # outputs of the deep blocks, on "meta"

    @property
    def kept(self) -> Iterator[KeptTensors]:
        yield self._kept

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return self.blocks.middle

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.call is not None
        if module in self.blocks.first:
            output = work(*args, **kwargs)
            if module is self.blocks.first[-1] and self.settings.kind.decides == "first blocks":
                self.decide(tree_leaves(output)[0])
            return output
        last = module is self.blocks.middle[-1]
        if not self.skips:
            output = work(*args, **kwargs)
            self._forms[module] = tree_map(_form, output)
            if last:
                self._kept.keep(
                    [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)], self.call.step
                )
            return output
        leaves, spec = tree_flatten(self._forms[module])
        given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        there = iter(self._kept.predicted(self.call.step) if last else ())
        filled = [
            (next(there) if last else given.new_zeros((), dtype=leaf.dtype).expand(leaf.shape))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        return tree_unflatten(filled, spec)

    def _decided(self) -> None:
        super()._decided()
        if self.skips:
            self._leave_out(self.skippable)


def _form(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
