"""Which inputs of a repeated block its outputs replace: the streams that pass from block to block.

A block of a transformer is given hidden states, often beside those of the prompt, and returns both changed. Which of
its outputs is which is learned from one run: an output is the input of the next block that is the same tensor, under
that parameter's name; where no next block shows it, the one of the same class, then of the same shape, in the order of
the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.apply.activations.caches.step_counter import parameter_names

__all__ = ["BlockOutput", "StreamLearner", "stream_inputs"]


def stream_inputs(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors that `block` is given, by the names of its parameters, in their order."""
    names = parameter_names(type(block))
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {
        name: given[name]
        for name in names
        if isinstance(given.get(name), torch.Tensor) and given[name].is_floating_point()
    }


@dataclass(frozen=True)
class BlockOutput:
    """How a block's output is made of streams: which stream each of its leaves is; None: not a stream."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # with a mark in place of tensors
    streams: tuple[str | None, ...]

    @classmethod
    def found(cls, spec: TreeSpec, leaves: Sequence[Any], streams: Sequence[str | None]) -> BlockOutput:
        """Return that of an output with these leaves, each of which is the stream of that name."""
        plain = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(spec, plain, tuple(streams))

    @property
    def complete(self) -> bool:
        """Whether every tensor of the output is a stream."""
        return all(
            stream is not None or leaf is not _TENSOR for stream, leaf in zip(self.streams, self.leaves, strict=True)
        )

    def taken(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the streams of `output`."""
        return {
            name: leaf for name, leaf in zip(self.streams, tree_flatten(output)[0], strict=True) if name is not None
        }

    def made_of(self, streams: Mapping[str, torch.Tensor]) -> Any:
        """Return an output of these streams."""
        leaves = [leaf if name is None else streams[name] for name, leaf in zip(self.streams, self.leaves, strict=True)]
        return tree_unflatten(leaves, self.spec)


_TENSOR = object()


class StreamLearner:
    """Learns the BlockOutput of each block from one run of them, in the order in which they run."""

    def __init__(self) -> None:
        self.outputs: dict[nn.Module, BlockOutput] = {}
        self._before: tuple[nn.Module, dict[str, torch.Tensor], Any] | None = None  # the block that ran last

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Note that a block with these `inputs` begins: what the one before returned may be among them."""
        self._settle(inputs)

    def end(self, block: nn.Module, inputs: dict[str, torch.Tensor], output: Any) -> None:
        """Note what `block` returned."""
        self._before = block, inputs, output

    def finish(self) -> None:
        """Note that no further block runs."""
        self._settle({})

    def _settle(self, following: Mapping[str, torch.Tensor]) -> None:
        if self._before is None:
            return
        (block, inputs, output), self._before = self._before, None
        leaves, spec = tree_flatten(output)
        named = {id(tensor): name for name, tensor in following.items()}
        streams = [name if _alike(inputs.get(name := named.get(id(leaf), "")), leaf) else None for leaf in leaves]
        if any(isinstance(leaf, torch.Tensor) and name is None for leaf, name in zip(leaves, streams, strict=True)):
            same = next((known for other, known in self.outputs.items() if type(other) is type(block)), None)
            if same is not None and same.spec == spec:
                streams = [
                    name or (usual if _alike(inputs.get(usual or ""), leaf) else None)
                    for leaf, name, usual in zip(leaves, streams, same.streams, strict=True)
                ]
            streams = _by_shape(leaves, streams, inputs)
        self.outputs[block] = BlockOutput.found(spec, leaves, streams)


def _by_shape(
    leaves: Sequence[Any], streams: Sequence[str | None], inputs: Mapping[str, torch.Tensor]
) -> list[str | None]:
    found = list(streams)
    for place, leaf in enumerate(leaves):
        if found[place] is None and isinstance(leaf, torch.Tensor):
            found[place] = next(
                (name for name, tensor in inputs.items() if name not in found and _alike(tensor, leaf)), None
            )
    return found


def _alike(one: torch.Tensor | None, other: Any) -> bool:
    if one is None or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and one.dtype == other.dtype
