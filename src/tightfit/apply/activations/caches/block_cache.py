"""Step caches over repeated blocks: in a skipped step, the blocks in the middle are left out.

The first blocks run in every step, and so may the last. What the blocks between them add to the streams that pass
through (`block_streams`), or their output, is kept and reused. Where the streams change their names or shapes on the
way, as where a network joins the text to the image, each stretch is kept by itself. Lists of blocks with less than an
eighth of the largest list's weights (refiners) are left alone: they run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.caches.block_streams import BlockOutput, StreamLearner, stream_inputs
from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.errors import CacheError, RunError
from tightfit.measure.modules import find_blocks, weight_bytes
from tightfit.schema.step_cache import StepCache

__all__ = ["BlockCache", "SkippableBlocks"]

LEAST_SHARE = 8  # lists of blocks with less than one over this of the largest list's weights always run


@dataclass(frozen=True)
class SkippableBlocks:
    """Blocks of a network in the order in which they run: those at the beginning that always run, and the middle."""

    first: tuple[nn.Module, ...]
    middle: tuple[nn.Module, ...]

    @classmethod
    def of(cls, name: str, network: nn.Module, settings: StepCache) -> SkippableBlocks:
        """Return the blocks of `network`, the component `name`. Raises CacheError if none is left to be skipped."""
        lists: dict[str, list[nn.Module]] = {}
        for path, block in find_blocks(network).items():
            lists.setdefault(path.rpartition(".")[0], []).append(block)
        sizes = {path: sum(map(weight_bytes, blocks)) for path, blocks in lists.items()}
        most = max(sizes.values(), default=0)
        blocks = [block for path, some in lists.items() if sizes[path] * LEAST_SHARE >= most for block in some]
        first, last = settings.value("first_blocks"), settings.value("last_blocks")
        middle = blocks[first : len(blocks) - last]
        if not middle or (settings.decides_in_blocks and not first):
            raise CacheError(
                f"cache={settings.strategy} leaves none of the {len(blocks)} blocks of {name} to be skipped: "
                f"first_blocks={first}, last_blocks={last}",
                component=name,
            )
        return cls(tuple(blocks[:first]), tuple(middle))


@dataclass
class _Stretch:
    """Blocks in a row through which the same streams pass, and what they add to these."""

    last: nn.Module
    names: tuple[str, ...]
    kept: KeptTensors


class BlockCache(BranchCache):
    """Leaves out the blocks in the middle of a network."""

    def __init__(
        self, blocks: SkippableBlocks, settings: StepCache, host_pool: ActivationHostPool | None, leave_out: LeaveOut
    ) -> None:
        super().__init__(settings, host_pool, leave_out)
        self.blocks = blocks
        self._learner: StreamLearner | None = StreamLearner()
        self._outputs: Mapping[nn.Module, BlockOutput] = {}
        self._stretches: dict[nn.Module, _Stretch] = {}  # by the first block of each
        self._learned: list[nn.Module] = []  # middle blocks in the order in which they ran when they were learned
        self._ran: list[nn.Module] = []  # those of the call in progress
        self._first: nn.Module | None = None  # the first block of the stretch in progress, …
        self._onto: dict[str, torch.Tensor] = {}  # … and the streams before it
        self._last_output: Any = None  # of the middle block that ran last
        self._before: tuple[str, torch.Tensor] | None = None  # the main stream before the first blocks, and its name

    @property
    def kept(self) -> Iterator[KeptTensors]:
        return (each.kept for each in self._stretches.values())

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return self.blocks.middle

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        super().begin(call, skips)
        self._forget_call()

    def _forget_call(self) -> None:
        self._ran, self._first, self._onto = [], None, {}
        self._last_output = self._before = None

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.failed is not None:
            return work(*args, **kwargs)
        inputs = stream_inputs(module, args, kwargs)
        if module in self.blocks.first:
            if module is self.blocks.first[0] and self.settings.kind.decides == "first blocks":
                self._before = next(iter(inputs.items()), None)
            return self._run(module, inputs, lambda: work(*args, **kwargs))
        if not self._ran:
            self._decide_by(inputs)
        self._ran.append(module)
        if self.skips:
            return self._skipped(module, inputs)
        return self._run(module, inputs, lambda: work(*args, **kwargs))

    def _decide_by(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Decide by what the first blocks added to the main stream, as the block after them is given it."""
        name, before = self._before or ("", None)
        self._before = None
        if before is not None and _alike(inputs.get(name), before):
            self.decide(inputs[name] - before)
        if self.skips is None:  # there is nothing to decide by
            self.skips = False
            self._decided()

    def _decided(self) -> None:
        super()._decided()
        if self.skips:
            self._leave_out(self.skippable)

    # blocks that run

    def _run(self, block: nn.Module, inputs: dict[str, torch.Tensor], work: Callable[[], Any]) -> Any:
        """Run a block; keep what the stretch that ends with it, or before it, added to its streams."""
        if self._learner is not None:
            self._learner.begin(inputs)
        middle = block not in self.blocks.first
        if middle:
            self._pass_on(block, inputs)
        output = work()
        if self._learner is not None:
            self._learner.end(block, inputs, output)
        if middle:
            self._last_output = output
            stretch = self._stretches.get(self._first) if self._first is not None else None
            if stretch is not None and stretch.last is block:
                self._close(block)
        return output

    def _pass_on(self, block: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        """Begin a stretch with `block`, unless the streams of the one in progress go on in it."""
        if self._first is not None and self._learner is not None:
            last = self._ran[-2]
            streams = self._learner.outputs[last].taken(self._last_output)
            if any(not _alike(inputs.get(name), self._onto.get(name)) for name in streams):
                self._learn_stretch(last)
                self._close(last)
        if self._first is None:
            self._first, self._onto = block, inputs

    def _learn_stretch(self, last: nn.Module) -> None:
        assert self._learner is not None
        assert self._first is not None
        output = self._learner.outputs[last]
        names = tuple(name for name in output.streams if name is not None and name in self._onto)
        kept = KeptTensors(self.settings.value("order") or 0, self._host_pool)
        self._stretches[self._first] = _Stretch(last, names, kept)

    def _close(self, last: nn.Module) -> None:
        """Keep what the stretch in progress, which ends with `last`, added to its streams."""
        assert self._first is not None
        assert self.call is not None
        stretch, onto = self._stretches[self._first], self._onto
        form = self._outputs[last] if self._learner is None else self._learner.outputs[last]
        output = form.taken(self._last_output)
        residual = self.settings.kind.residual
        value = [output[name] - onto[name] if residual else output[name] for name in stretch.names]
        stretch.kept.keep(value, self.call.step)
        self._first, self._onto, self._last_output = None, {}, None

    # blocks that are skipped

    def _skipped(self, block: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        assert self.call is not None
        if block not in self._outputs:
            raise self._others()
        if block in self._stretches:
            self._first = block
            self._onto = {name: inputs[name] for name in self._stretches[block].names}
        streams: Mapping[str, torch.Tensor] = inputs
        stretch = self._stretches[self._first] if self._first is not None else None
        if stretch is not None and stretch.last is block:
            onto = [self._onto[name] for name in stretch.names] if self.settings.kind.residual else None
            streams = dict(zip(stretch.names, stretch.kept.predicted(self.call.step, onto), strict=True))
            self._first, self._onto = None, {}
        return self._outputs[block].made_of(streams)

    def end(self) -> None:
        if self.failed is None:
            if self._learner is not None:
                self._end_learning(self._learner)
            elif self._ran != self._learned:
                if self.skips:
                    raise self._others()
                self.fail("its blocks do not run in the same order in each step")
        self._forget_call()
        super().end()

    def _end_learning(self, learner: StreamLearner) -> None:
        learner.finish()
        if self._first is not None:
            self._learn_stretch(self._ran[-1])
            self._close(self._ran[-1])
        self._outputs, self._learned, self._learner = learner.outputs, self._ran, None
        if incomplete := [block for block in self._learned if not self._outputs[block].complete]:
            self.fail(f"{type(incomplete[0]).__name__} returns a tensor that is none of its inputs")

    def fail(self, why: str) -> None:
        super().fail(why)
        self._stretches = {}

    def _others(self) -> RunError:
        """Return the error for a skipped step in which other blocks would run than those that are known."""
        assert self.call is not None
        return RunError(
            f"step {self.call.step} is skipped by {self.settings.strategy}, but uses other blocks than the first step, "
            f"which used {len(self._learned)} after those that always run: make this call without a step cache",
            step=self.call.step,
        )


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape
