"""FasterCache: attention is predicted from its last two outputs, and the unconditional prediction from the other one.

Outputs of attention layers that attend to more than the prompt are continued from the last two that were computed, by
a share of their difference that grows over the steps. In most steps the network computes the conditional prediction
alone. The unconditional one is that plus their difference in the last step in which both were computed, whose low
frequencies count more in the earlier steps, and the high ones in the later (CFG-Cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.caches.attention_cache import AttentionCache
from tightfit.apply.activations.caches.branch_cache import LeaveOut, Work
from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.caches.guidance import (
    ConditionalHalf,
    ConditionalPrediction,
    Predictions,
    predictions_of,
)
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.spectra import circular_gain, filtered
from tightfit.apply.activations.caches.step_counter import DenoiserCall, call_inputs
from tightfit.apply.activations.caches.token_grid import token_grid
from tightfit.apply.activations.outputs import combine, take_apart
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.schema.step_cache import StepCache

__all__ = ["FasterCache"]

WEIGHT = 0.5  # of the last change of an attention's output, if the number of steps is not known
LOW_UNTIL, HIGH_FROM = 0.9, 0.7  # shares of the steps until which low frequencies grow, and from which high ones do


class FasterCache(AttentionCache):
    """Predicts attention outputs, and the unconditional prediction.

    Of a batch of both predictions, attention is kept for the conditional one alone, and is predicted only in steps that
    leave the other one out. Calls of one prediction each are told apart by diffusers' names for them.
    """

    def __init__(
        self, network: nn.Module, layers: tuple[nn.Module, ...], settings: StepCache,
        host_pool: ActivationHostPool | None, leave_out: LeaveOut, pipeline: DenoisingPipeline,
        conditional: ConditionalPrediction,
    ) -> None:  # fmt: skip
        super().__init__(layers, settings, host_pool, leave_out)
        self._network, self._pipeline, self._conditional = network, pipeline, conditional
        self._role: Predictions = "other"
        self._difference = KeptTensors(0, host_pool)  # of the unconditional prediction from the conditional one
        self._ran_both: int | None = None  # last step in which the unconditional prediction was computed
        self._gains = (1.0, 1.0)  # of low and high frequencies of the difference
        self._shape: torch.Size | None = None  # in which the difference has rows and columns …
        self._axes: tuple[int, int] = (0, 0)  # … and which of its axes these are
        self._rebuild: Callable[[Sequence[torch.Tensor]], Any] | None = None
        self._is_batch: bool | None = None  # whether calls are batches of both; None: not known yet
        self._half: ConditionalHalf | None = None  # of the batch of the call in progress
        self._leaves_out = False  # whether the call in progress leaves out the unconditional prediction

    @property
    def kept(self) -> Iterator[KeptTensors]:
        yield from super().kept
        yield self._difference

    @property
    def able(self) -> bool:
        """Whether attention can be predicted."""
        return self.failed is None and bool(self._values) and all(each.known for each in self._values.values())

    # which call leaves out what

    def foreseen(self, call: DenoiserCall) -> bool | None:
        return self._leaves_out_unconditional(call) or any(self._foreseen(call).values())

    def _foreseen(self, call: DenoiserCall) -> dict[bool, bool]:
        allowed = not self._is_batch or self._leaves_out_unconditional(call)
        return {False: allowed and self.able and self._reuses(call, False), True: False}

    def _leaves_out_unconditional(self, call: DenoiserCall) -> bool:
        if not self._difference.known or not (self._is_batch or self._conditional.is_of(call.step)):
            return False
        if self.settings.skipped_steps is not None:
            return call.step in self.settings.skipped_steps
        return self._within(call, self._ran_both, "guidance_interval")

    def left_out_by(self, call: DenoiserCall) -> tuple[nn.Module, ...]:
        return ()  # which prediction it is of is known when it begins

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        self._role, self._half = predictions_of(call), None
        self._leaves_out = self._leaves_out_unconditional(call)
        if not self._leaves_out_all:
            super().begin(call, skips)
            return
        self.call, self.skips, self._reused = call, True, {False: True, True: True}
        self._difference.fetch()
        self._leave_out(self._network.children())

    @property
    def _leaves_out_all(self) -> bool:
        """Whether nothing is left of the call in progress."""
        return self._leaves_out and not self._is_batch

    # the network

    def network(self, network: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.call is not None
        if self._leaves_out_all:
            assert self._rebuild is not None
            return self._rebuild([self._unconditional(self.call, None)])
        if self._is_batch is None:
            self._is_batch = self._finds_batch(network, args, kwargs)
        self._half = ConditionalHalf.again(network, args, kwargs) if self._is_batch else None
        if self._leaves_out and self._half is not None:
            some_args, some_kwargs = self._half.cut(args, kwargs)
            (half, *_), rebuild = take_apart(work(*some_args, **some_kwargs))
            return rebuild([torch.cat([self._unconditional(self.call, half), half])])
        self._difference.drop()
        output = work(*args, **kwargs)
        if (why := self._keep_guidance(self.call, output, call_inputs(network, args, kwargs))) is not None:
            self._computes_all(why)
        return output

    def _finds_batch(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether calls are batches of both predictions, of which one may be left out."""
        if not self._pipeline.whole_batches and self._pipeline.guided() is not False:
            self._computes_all("the plan splits or joins its batches")
        never = self.settings.skipped_steps is None and self.settings.value("guidance_interval") == 1
        if self._role != "other" or never or not self._pipeline.whole_batches:
            return False
        found = ConditionalHalf.of(network, args, kwargs, self._pipeline)
        if isinstance(found, str):
            self._computes_all(found)
        return isinstance(found, ConditionalHalf)

    def _computes_all(self, why: str) -> None:
        """Compute both predictions in every step."""
        self.remark = f"both guidance predictions are computed in every step: {why}"
        if self._is_batch:
            self.forget()  # attention was kept for one of them
        self._is_batch, self._half = False, None

    def _keep_guidance(self, call: DenoiserCall, output: Any, given: dict[str, Any]) -> str | None:
        """Keep what the unconditional prediction adds to the other one. Return why that cannot be done."""
        if not self._pipeline.whole_batches:
            return None
        if self._role == "other" and not self._is_batch:
            unnamed = isinstance(call.branch, int) and call.branch > 0
            return "its calls are not named after the predictions" if unnamed else None
        try:
            (tensor,), _ = take_apart(output)
        except (TypeError, ValueError):
            return f"a {type(output).__name__} is not one tensor"
        if self._role == "conditional":
            self._conditional.note(call.step, tensor)
            return None
        return self._keep_difference(call, output, tensor, given)

    def _keep_difference(
        self, call: DenoiserCall, output: Any, tensor: torch.Tensor, given: dict[str, Any]
    ) -> str | None:
        """Keep the difference of the predictions; `tensor`, in `output`, is the unconditional one, or both."""
        if not (self._is_batch or self._conditional.is_of(call.step)):
            return "the unconditional one is computed first"
        one, other = tensor.chunk(2) if self._is_batch else (tensor, self._conditional.like(tensor))
        if self._shape is None and (why := self._find_axes(one, given)) is not None:
            return why
        self._difference.keep([one - other], call.step)
        self._gains = (1.0, 1.0)
        self._rebuild = take_apart(combine([output], lambda made: torch.empty_like(made[0], device="meta")))[1]
        return None

    def _find_axes(self, tensor: torch.Tensor, given: dict[str, Any]) -> str | None:
        """Find the rows and columns of a prediction; return why it has none."""
        if tensor.ndim >= 4:
            self._shape, self._axes = tensor.shape, (tensor.ndim - 2, tensor.ndim - 1)
            return None
        grid = token_grid(tensor.shape[1], given, None) if tensor.ndim == 3 else None
        if grid is None or len(grid) < 2:
            return f"an output of {tuple(tensor.shape)} has no rows and columns"
        self._shape = torch.Size([len(tensor), *grid, tensor.shape[2]])
        self._axes = (len(grid) - 1, len(grid))
        return None

    def _unconditional(self, call: DenoiserCall, conditional: torch.Tensor | None) -> torch.Tensor:
        """Return the unconditional prediction, by the conditional one: of this call, or None: of the one before."""
        assert self._shape is not None
        (difference,) = self._difference.predicted(call.step)
        late = 0.0 if call.steps is None else call.step / call.steps
        low, high = self._gains
        if call.steps is None or late < LOW_UNTIL:
            low *= self.settings.value("low_frequencies")
        if call.steps is None or late >= HIGH_FROM:
            high *= self.settings.value("high_frequencies")
        self._gains = (low, high)
        whole = difference.reshape(self._shape)
        added = filtered(whole, circular_gain(whole, self._axes, low, high), self._axes)
        base = self._conditional.like(difference) if conditional is None else conditional
        return base + added.reshape(difference.shape)

    # attention

    def _new(self, module: nn.Module, leaves: list[torch.Tensor]) -> KeptTensors | None:
        odd = self._half is not None and any(leaf.ndim == 0 or len(leaf) % 2 for leaf in leaves)
        return None if odd or module in self._cross else KeptTensors(1, self._host_pool, per_step=False)

    def _own(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._half is None or self._leaves_out:
            return leaves
        return [leaf.chunk(2)[1].clone() for leaf in leaves]  # a view would keep the whole

    def _predicted(self, kept: KeptTensors, call: DenoiserCall) -> list[torch.Tensor]:
        weight = self.settings.value("weight")
        if weight is None:
            weight = WEIGHT if call.steps is None else call.step / max(call.steps - 1, 1)
        return kept.predicted(call.step, passed=weight)

    # ends

    def end(self) -> None:
        assert self.call is not None
        if not self._leaves_out:
            self._ran_both = self.call.step
        if self._role == "unconditional":
            self._conditional.clear()
        self._half = None  # it has what the network was given
        super().end()

    def outlook(self, call: DenoiserCall) -> str:
        return super().outlook(call) + (" without guidance" if self._leaves_out_unconditional(call) else "")

    def repeat(self, call: DenoiserCall) -> None:
        leaves_out = self._leaves_out_unconditional(call)
        if leaves_out and not self._is_batch:
            self.skipped_last = True
        else:
            super().repeat(call)
            self.skipped_last |= leaves_out
        if not leaves_out:
            self._ran_both = call.step
        if self._role == "conditional":
            self._conditional.note(call.step, None)
        elif self._role == "unconditional":
            self._conditional.clear()
