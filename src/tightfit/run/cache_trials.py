"""A pipeline and calls of it → step caches tried on them: how much the pictures change, and what is saved.

The calls are made without a cache, then with step caches that skip nothing, to see how much changes from step to step,
and then with settings of each strategy that follow from that.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tightfit.apply.activations.caches.step_changes import StepChanges
from tightfit.apply.fitting import Fitted
from tightfit.checkpoint.loading import load_pipeline
from tightfit.devices.device import Device
from tightfit.errors import BudgetTooSmall, CacheError, InputError, RunError, unknown_name
from tightfit.measure.modules import HANDLE
from tightfit.measure.picture_difference import psnr
from tightfit.progress import ProgressTracker, listening, showing
from tightfit.run.cache_candidates import candidates_for, checked_strategies, observing
from tightfit.run.calibrated_caches import PipelineIdentity, keep_calibration
from tightfit.run.call_arguments import call_arguments
from tightfit.run.fit import fit
from tightfit.run.limits import BudgetLike, Limits
from tightfit.run.models import find_model
from tightfit.run.prompt import Prompt
from tightfit.run.run_target import RunOptions
from tightfit.schema.cache_calibration import CacheCalibration, CacheTrial
from tightfit.schema.request import Request
from tightfit.schema.results import Trace
from tightfit.schema.step_cache import CacheTrace, StepCache

__all__ = ["Calls", "calibrate", "calibrate_model"]

Calls = Sequence[str | Mapping[str, Any]]  # prompts, or arguments of calls by name
WORST = 20.0  # dB: settings of a strategy that skip more than those below it are not tried


def calibrate(
    pipe: Any,
    calls: Calls,
    *,
    strategies: Sequence[str] | None = None,
    budget: BudgetLike = None,
    ram: str | int | None = None,
    device: str | torch.device | Device | None = None,
    **common: Any,
) -> CacheCalibration:
    """Try step caches on `pipe`, and keep what they are like: `fit(pipe, …, allow=["step-cache"])` chooses by it.

    `calls` are prompts, or arguments by name of a few calls; `common` are arguments of all of them, such as
    `num_inference_steps=28`. Two or three calls of the kind that is to be made do; each is made about 30 times. All of
    them are within `budget` and `ram` on `device`, as for `fit`. `strategies` are names of step caches (default: all
    that lose something). A strategy that this pipeline does not take is left out.

    Returns the trials: for each step cache the least and the mean PSNR of its pictures to those without, in dB, the
    steps that it skipped, the share of the denoising time that was left, and the bytes that it kept. They are stored in
    tightfit's cache folder, and are valid for pipelines with the same weights, and for calls with about as many steps.
    Any plan of the pipeline is undone, before and after.

    Raises InputError for calls that return no pictures or take no steps, or for unknown strategies, and as `fit`.
    """
    names = checked_strategies(strategies)
    if not calls or isinstance(calls, str):
        raise InputError(f"calls={calls!r:.60}: give a list of prompts, or of arguments of calls by name")
    if (earlier := getattr(pipe, HANDLE, None)) is not None:
        earlier.undo()
    identity = PipelineIdentity(pipe)
    trials = _Trials(pipe, [_arguments(pipe, each, index, common) for index, each in enumerate(calls)],
                     {"budget": budget, "ram": ram, "device": device})  # fmt: skip
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**settings | {"disable": True})
    try:
        with showing("calibrating", settings):
            found, reference = _tried(trials, names)
    finally:
        pipe._progress_bar_config = settings
    assert reference.steps is not None
    result = CacheCalibration(weights=identity.weights, calls=len(calls), steps=reference.steps, trials=tuple(found))
    keep_calibration(identity, result)
    return result


def calibrate_model(
    model: str | None, prompts: Sequence[str], request: Request, negative: str | None = None, *,
    strategies: Sequence[str] | None, budget: BudgetLike, ram: str | int | None, device: str | None, dtype: str | None,
) -> CacheCalibration:  # fmt: skip
    """Load `model`, a folder or a hub id (None: the demo model), and calibrate it with calls of that `request`."""
    checked_strategies(strategies)
    target = RunOptions({}, Limits(None), device, dtype).target()
    folder = find_model(model)
    pipe = load_pipeline(folder, getattr(torch, target.dtype_of(folder)))
    calls = []
    for index, text in enumerate(prompts):
        arguments = call_arguments(pipe, Prompt(text, index, negative), request)
        calls.append({name: value for name, value in arguments.items() if name != "generator"} | {"seed": index})
    return calibrate(pipe, calls, strategies=strategies, budget=budget, ram=ram, device=target.device)


def _tried(trials: _Trials, names: Sequence[str]) -> tuple[list[CacheTrial], _Made]:
    """Return the trials of all strategies `names`, and the calls without a step cache."""
    tracker, found = ProgressTracker(len(names) + 1), list[CacheTrial]()
    reference = trials.made(None)
    if reference is None or not reference.steps:
        raise InputError(f"{trials.kind} counts no denoising steps: there is nothing that could be skipped")
    tracker.did(1)
    for name in names:
        found += trials.of_strategy(name, reference)
        tracker.did(1)
    return found, reference


def _arguments(pipe: Any, call: str | Mapping[str, Any], index: int, common: Mapping[str, Any]) -> dict[str, Any]:
    taken = inspect.signature(type(pipe).__call__).parameters
    given = dict(common) | ({"prompt": call} if isinstance(call, str) else dict(call))
    for name in given.keys() - {"seed"}:
        if name not in taken:
            raise InputError(unknown_name(f"argument of {type(pipe).__name__}", name, taken), name=name)
    if "output_type" in taken:
        given["output_type"] = "np"
    if isinstance(given.get("generator"), torch.Generator):
        given["seed"] = given.pop("generator").initial_seed()
    return {"seed": index} | given


class _Made(NamedTuple):
    """All calls under one plan."""

    pictures: list[torch.Tensor]  # of each call: [N, C, H, W], from 0 to 1
    seconds: float  # of denoising, without the first call's, which may warm up
    caches: list[CacheTrace]  # one for each call and component
    changes: list[StepChanges]
    steps: int | None
    cached: bool  # whether the plan has a step cache


class _Trials:
    """Makes the same calls under several plans."""

    def __init__(self, pipe: Any, calls: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> None:
        self._pipe, self._calls, self._limits = pipe, calls, limits
        self.kind = type(pipe).__name__

    def of_strategy(self, name: str, reference: _Made) -> Iterator[CacheTrial]:
        """Yield trials of a strategy's settings, until the pictures are too different; none if it does not suit."""
        assert reference.steps is not None
        changes, filters = list[StepChanges](), None
        for observer in (observers := observing(name)):
            observed = self.made(observer)
            if observed is not None and observed.cached:
                changes, filters = observed.changes, observer.filters
                break
        if observers and not changes:
            return
        known = set[tuple[int, ...]]()
        for cache in candidates_for(name, changes, reference.steps, filters):
            made = self.made(cache)
            if made is None or not made.cached or not any(each.skipped_steps for each in made.caches):
                continue
            trial = _trial(cache, made, reference)
            if trial.skipped_steps in known:  # as an earlier one
                continue
            known.add(trial.skipped_steps)
            yield trial
            if not trial.within(WORST):
                return

    def made(self, cache: StepCache | None) -> _Made | None:
        """Make all calls with `cache`; None if the pipeline does not take it, it does not fit, or a call fails."""
        with listening(lambda share, left: None):  # planning has a progress of its own
            try:
                fitted = fit(self._pipe, cache=cache, example=_example(self._calls[0]), **self._limits)
            except (CacheError, BudgetTooSmall):
                if cache is None:
                    raise
                return None
            try:
                return self._under(fitted)
            except RunError:  # e.g. other blocks in a skipped step
                if cache is None:
                    raise
                return None
            finally:
                fitted.undo()

    def _under(self, fitted: Fitted) -> _Made:
        changes = [cache.observe() for cache in fitted.session.caches.values()]
        pictures, traces = list[torch.Tensor](), list[Trace]()
        for call in self._calls:
            output = self._pipe(**_example(call))
            pictures.append(_as_pictures(self._pipe, output[0]))
            traces.append(fitted.report().trace)
        timed = traces[1:] or traces
        return _Made(
            pictures,
            sum(phase.seconds for trace in timed for phase in trace.phases if phase.name.startswith("denoise")),
            [each for trace in traces for each in trace.caches],
            [each for some in changes for each in some],
            getattr(self._pipe, "num_timesteps", None),
            any(part.cache is not None for part in fitted.plan.components.values()),
        )


def _example(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `call`, with a new generator in place of its seed."""
    rest = {name: value for name, value in call.items() if name != "seed"}
    return rest | {"generator": torch.Generator().manual_seed(call["seed"])}


def _as_pictures(pipe: Any, output: Any) -> torch.Tensor:
    """Return pictures, or frames, as [N, C, H, W]. InputError if there are none."""
    values = np.asarray(output)
    if values.ndim not in (4, 5) or values.shape[-1] not in (1, 3, 4):
        kind = f"{type(output).__name__} of shape {list(values.shape)}"
        raise InputError(f"{type(pipe).__name__} returns {kind}, and calibration compares pictures or frames")
    return torch.from_numpy(values.astype(np.float32)).flatten(0, -4).movedim(-1, 1)


def _trial(cache: StepCache, made: _Made, reference: _Made) -> CacheTrial:
    pairs = [
        (one[None], other[None])
        for some, others in zip(made.pictures, reference.pictures, strict=True)
        for one, other in zip(some, others, strict=True)
    ]
    ratios = [ratio for pair in pairs if (ratio := psnr(*pair)) != float("inf")]
    counts = collections.Counter(step for trace in made.caches for step in trace.skipped_steps)
    mean_skipped = counts.total() / len(made.caches)
    return CacheTrial(
        cache=cache,
        least_psnr=round(min(ratios), 2) if ratios else None,
        mean_psnr=round(sum(ratios) / len(ratios), 2) if ratios else None,
        skipped_steps=tuple(sorted(step for step, _ in counts.most_common(round(mean_skipped)))),
        mean_skipped=round(mean_skipped, 2),
        seconds_share=round(made.seconds / reference.seconds, 3),
        device_bytes=max(each.device_bytes for each in made.caches),
        host_bytes=max(each.host_bytes for each in made.caches),
    )
