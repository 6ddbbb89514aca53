"""A denoiser's batch, of which each of two groups of ranks computes one half: with guidance, one prediction of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.max_batch import Batch, cut_items, find_batch, laid_out_as, why_not_split
from tightfit.apply.activations.outputs import take_apart
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.direct_calls import needs_gradients
from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.recorder import Recorder

__all__ = ["BatchHalves", "why_not_halved"]


class BatchHalves:
    """Runs calls of the denoiser `name` on half of their batch, and gathers both halves on all ranks.

    Calls whose batch has no halves run whole in both groups.
    """

    def __init__(self, name: str, guidance: GuidanceRanks, recorder: Recorder) -> None:
        self._name, self._guidance, self._recorder = name, guidance, recorder
        self._whole: dict[Any, str] = {}  # calls whose outputs have no halves, and why

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in place of `forward`, which takes the network first."""

        @functools.wraps(forward)
        def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
            batch, call = find_batch(network, args, kwargs), call_signature(args, kwargs)
            if batch is None or call in self._whole or why_not_halved(network, args, kwargs) is not None:
                return forward(network, *args, **kwargs)
            guidance, half = self._guidance, batch.count // 2
            with guidance.branches.call():
                guidance.branches.check_same(self._name, _tensors((args, kwargs)))
                items = range(guidance.number * half, (guidance.number + 1) * half)
                own_args, own_kwargs = batch.map(functools.partial(cut_items, items), args, kwargs)
                own = forward(network, *own_args, **own_kwargs)
                try:
                    return self._both(own, half)
                except _NoHalvesError as error:
                    self._whole[call] = str(error)
            self._recorder.note(f"{self._name}: both groups of ranks compute whole batches: {self._whole[call]}")
            return forward(network, *args, **kwargs)

        return run

    def _both(self, own: Any, half: int) -> Any:
        """Return the output for the whole batch, of which this group has `own`, that of `half` of its items."""
        try:
            tensors, rebuild = take_apart(own)
        except TypeError as error:
            raise _NoHalvesError(f"its output is a {type(own).__name__}") from error
        for tensor in tensors:
            if tensor.ndim == 0 or len(tensor) % half:
                raise _NoHalvesError(f"{half} items gave a tensor of {tuple(tensor.shape)}")
        others = self._guidance.swap(tensors)
        return rebuild([self._joined(*each) for each in zip(tensors, others, strict=True)])

    def _joined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        whole = laid_out_as(own, 2 * len(own))
        halves = (own, other) if self._guidance.number == 0 else (other, own)
        for number, half in enumerate(halves):
            whole.narrow(0, number * len(own), len(own)).copy_(half)
        return whole


class _NoHalvesError(Exception):
    """An output that cannot be joined from those of two halves of the batch."""


def why_not_halved(network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why a call of `network` cannot be computed as two halves of its batch; None: it can."""
    given = dict(kwargs)
    batch = find_batch(network, args, given)
    if batch is None:
        return "its first argument is not a batch of three or more dimensions"
    return _why_odd(batch) or why_not_split(network, batch, args, given) or why_not_divided(network, args, given)


def why_not_divided(network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why groups of ranks cannot compute different parts of a network's calls; None: they can."""
    if needs_gradients(network, args, kwargs):
        return "gradients were asked for"
    return "it is in training mode" if network.training else None


def _why_odd(batch: Batch) -> str | None:
    return f"its batch of {batch.count} has no halves" if batch.count % 2 else None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
