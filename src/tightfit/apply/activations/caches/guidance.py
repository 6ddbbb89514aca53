"""Guidance predictions of a step: which of them a call of the network computes, and what another one needs of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.apply.activations.max_batch import Batch, cut_items, find_batch, why_not_split
from tightfit.errors import RunError

__all__ = ["ConditionalHalf", "ConditionalPrediction", "Predictions", "predictions_of"]

Predictions = Literal["conditional", "unconditional", "other"]


def predictions_of(call: DenoiserCall) -> Predictions:
    """Return which prediction `call` computes by its pipeline's name for it; "other": both in a batch, or unnamed."""
    names: dict[str | int, Predictions] = {"cond": "conditional", "uncond": "unconditional"}
    return names.get(call.branch, "other")


class ConditionalPrediction:
    """The conditional prediction of a step, for the call of the unconditional one that follows.

    It is not counted as kept: the pipeline has the same tensor until it puts the two together.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._step: int | None = None
        self._tensor: torch.Tensor | None = None

    def note(self, step: int, tensor: torch.Tensor | None) -> None:
        """Note that of `step`; None: its call was repeated on a simulated card, and has no tensor."""
        self._step, self._tensor = step, tensor

    def is_of(self, step: int) -> bool:
        """Whether that of `step` is there."""
        return self._step == step

    def like(self, other: torch.Tensor) -> torch.Tensor:
        """Return it; where a call was repeated, `other` has the same form."""
        return other if self._tensor is None else self._tensor


@dataclass(frozen=True)
class ConditionalHalf:
    """The second half of a batch, of which the first one is for the unconditional prediction, as in diffusers."""

    batch: Batch

    @classmethod
    def of(
        cls, network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], pipeline: DenoisingPipeline
    ) -> ConditionalHalf | str | None:
        """Return that of a call of `network`; text: why a batch cannot be halved; None: it is no batch of both.

        Both halves have the same latents then. Where simulated latents have no values, the pipeline says whether it
        makes two predictions, or a batch of an even number is assumed to be of both.
        """
        batch = find_batch(network, args, kwargs)
        if batch is None or batch.count % 2:
            return None
        one, other = batch.first.chunk(2)
        try:
            if not torch.equal(one, other):
                return None
        except RunError:
            if pipeline.guided() is False:
                return None
        return why_not_split(network, batch, args, kwargs) or cls(batch)

    @classmethod
    def again(cls, network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> ConditionalHalf | None:
        """Return that of a call with arguments of the same form as one that is known to be of both."""
        batch = find_batch(network, args, kwargs)
        return None if batch is None else cls(batch)

    def cut(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of this half."""
        half = range(self.batch.count // 2, self.batch.count)
        return self.batch.map(functools.partial(cut_items, half), args, kwargs)
