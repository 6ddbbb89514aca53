"""Reuse of what depends on nothing but the prompt: the same in every step, so no number changes.

A layer's output is reused if the layer is given one tensor that is the same, unchanged, as in an earlier step: one that
the network itself was given (other than latents and timestep), or what such a layer returned. In transformers with
cross-attention these are the projections of the prompt to keys and values, and where the network embeds the prompt
itself, that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_counter import DenoiserCall, call_inputs
from tightfit.measure.modules import find_blocks
from tightfit.schema.step_cache import StepCache

__all__ = ["PromptCache", "prompt_modules"]

Mark = tuple[Any, ...]  # of a tensor: which memory it shows, how, and in which version


def prompt_modules(network: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of `network` whose output may depend on the prompt alone: all but those around its blocks."""
    blocks = list(find_blocks(network).values())
    around = {network, *blocks}
    around |= {part for part in network.modules() if not around.isdisjoint(part.children())}
    return tuple(part for part in network.modules() if part not in around and next(part.parameters(), None) is not None)


@dataclass(frozen=True)
class _Reused:
    """A layer's output for an input, both kept as the tensors that they are."""

    given: torch.Tensor
    mark: Mark
    output: torch.Tensor
    output_mark: Mark


class PromptCache(BranchCache):
    """Reuses the outputs of layers that see nothing but the prompt."""

    def __init__(self, settings: StepCache, leave_out: LeaveOut) -> None:
        super().__init__(settings, None, leave_out)
        # what the network was given in the last call: kept, so that no other tensor gets their memory
        self._given: list[torch.Tensor] = []
        self._prompt: set[Mark] = set()  # tensors that depend on the prompt alone, if what was given stays the same
        self._seen: dict[nn.Module, _Reused] = {}

    @property
    def kept(self) -> Iterator[KeptTensors]:
        return iter(())

    @property
    def device_bytes(self) -> int:
        return sum(each.output.nbytes for each in self._seen.values())

    def foreseen(self, call: DenoiserCall) -> bool | None:
        return False

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return tuple(self._seen)

    def left_out_by(self, call: DenoiserCall) -> tuple[nn.Module, ...]:
        return self.skippable  # if the prompt remains the same

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        self.call, self.skips = call, bool(self._seen)

    def network(self, network: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note first what the network is given: all but latents and timestep may be the prompt."""
        given = list(call_inputs(network, args, kwargs).items())[1:]
        tensors = [leaf for name, value in given if "timestep" not in name for leaf in tree_leaves(value)]
        self._given = [leaf for leaf in tensors if _followed(leaf)]
        self._prompt = {_mark(tensor) for tensor in self._given}
        reused = set(self._prompt)
        for layer, known in list(self._seen.items()):
            if known.mark in reused and known.output_mark == _mark(known.output):
                reused.add(known.output_mark)
            else:
                del self._seen[layer]
        self._leave_out(self.skippable)
        return work(*args, **kwargs)

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not _followed(args[0]) or (mark := _mark(args[0])) not in self._prompt:
            return work(*args, **kwargs)
        known = self._seen.get(module)
        if known is None or known.mark != mark:
            output = work(*args, **kwargs)
            if not _followed(output):
                return output
            for inner in module.modules():  # what is inside is not asked any more
                self._forget(inner)
            known = self._seen[module] = _Reused(args[0], mark, output, _mark(output))
        self._prompt.add(known.output_mark)
        return known.output

    def _forget(self, module: nn.Module) -> None:
        """Free what `module` returned; its mark must go, too, as another tensor may get its memory."""
        if (known := self._seen.pop(module, None)) is not None:
            self._prompt.discard(known.output_mark)

    def end(self) -> None:
        self.skipped_last, self.call = bool(self.skips), None


def _followed(value: Any) -> bool:
    """Whether `value` is a tensor whose changes can be seen, and that no gradient flows through."""
    return isinstance(value, torch.Tensor) and not value.is_inference() and not value.requires_grad


def _mark(tensor: torch.Tensor) -> Mark:
    storage = tensor.untyped_storage()._cdata  # differs between all that are alive
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
