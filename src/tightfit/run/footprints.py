"""A pipeline, a folder, a known model or one call of a module → its Footprint, measured on a simulated card."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.checkpoint.folder import ModelFolder
from tightfit.errors import InputError, unknown_name
from tightfit.measure.call_log import CallLog
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.forked_work import forking
from tightfit.measure.meta_copy import fingerprint, meta_copy, without_hooks
from tightfit.measure.modules import COMPILED, compiled_around, find_components, inspect_pipeline
from tightfit.plan.default_rates import ANY_CARD
from tightfit.progress import ProgressTracker
from tightfit.run.answer_cache import Missing, footprint_question, keep_footprint, lookup, marked
from tightfit.run.argument_values import Given
from tightfit.run.collecting_rarely import collecting_rarely
from tightfit.run.differentiated_calls import with_gradients
from tightfit.run.models import DTYPES, resolve_model
from tightfit.run.module_footprint import Inputs, measure_module
from tightfit.run.rank_footprints import measure_rank
from tightfit.run.simulate import Inputs as CallInputs
from tightfit.run.simulate import SimulationRun
from tightfit.run.steps import steps_of
from tightfit.run.strip_profiles import AutoencoderStripProfiles
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.run.variants import VariantSimulator, measure_variants
from tightfit.schema.footprint import OPTIONAL_PARTS, STRIP_OPTIONS, Footprint
from tightfit.schema.request import Request
from tightfit.schema.step_cache import StepCache

__all__ = ["Measurer", "measure_footprint"]

PLAYING, BUILDING = 1.0, 0.3  # relative time of a simulated call, and of the part that builds its pipeline, …
# … and of the other measurements: rough, for the time left
SIZES = {"variants": 2.2} | dict.fromkeys(STRIP_OPTIONS, 0.3)


def measure_footprint(
    subject: Any,
    request: Request | Mapping[str, Any] | None = None,
    *,
    inputs: Inputs | None = None,
    dtype: str | None = None,
) -> Footprint:
    """Measure the components and the call of `subject`, without its weights and without a card.

    `subject` is a diffusers pipeline, a folder (its configurations are read, its weights are not), a hub id, or a
    known model's name; `request` is then the request to measure (default: a known model's usual request, else the
    pipeline's defaults), and `inputs` are further arguments of its call by name, e.g. a control image. If the pipeline
    needs input images and none are given, grey ones of the requested size are used. Models that are not loaded yet are
    measured in `dtype`: "bfloat16", "float16" or "float32" (default: as stored, or as a known model usually is).

    Or `subject` is a single module, or one of its methods (`vae.decode`); `inputs` are then the call's arguments, by
    position or by name: a tensor (only shape and dtype matter if it is large), a tuple of integers for a shape in the
    module's own dtype, other values as they are.

    Sizes are bytes as the CUDA caching allocator allocates them, without cuBLAS's workspace. The first two calls of a
    denoiser with each input shape are measured; later ones are assumed to equal the second. The result is cached on
    disk, except for modules with custom code or hooks.

    Raises InputError for what cannot be measured, ModelError for an invalid folder, RequestError for what the pipeline
    does not accept, PlanError for a pipeline that follows a plan (undo first) and for weights in a custom format.
    """
    parsed = request if isinstance(request, Request) else Request.from_mapping(request or {})
    if isinstance(subject, str | Path):
        model, mark = resolve_model(str(subject))
        return _kept(mark, parsed, inputs, model, _checked(dtype))
    if dtype is not None:
        raise InputError(f"a {type(subject).__name__} that is loaded has its own dtype: leave dtype={dtype} out")
    module, method = (subject.__self__, subject.__name__) if inspect.ismethod(subject) else (subject, "forward")
    if isinstance(module, nn.Module):
        if request is not None or inputs is None:
            raise InputError(
                f"a single {type(module).__name__} has no request: give inputs, e.g. inputs=[(1, 4, 64, 64)]",
                kind=type(module).__name__,
            )
        return measure_module(meta_copy(module), method, inputs)
    find_components(subject)  # PlanError if it has none
    return _kept(fingerprint(subject), parsed, inputs, subject)


class Measurer:
    """Measures calls of a pipeline in its present state, or of a folder or a known model, by name.

    Raises as `measure_footprint` does.
    """

    def __init__(
        self, subject: Any, dtype: str | None = None, *, expandable: bool = True,
        parallel: ContextParallel | None = None,
    ) -> None:  # fmt: skip
        """`expandable`: whether the allocators that plans are made for have expandable segments.

        `parallel`: the ranks that share the pipeline's rows; what this rank does is measured. None: there are none.
        """
        named = isinstance(subject, str | Path)
        self._model: Any = None
        self._model, self._own = resolve_model(str(subject)) if named else (meta_copy(subject), fingerprint(subject))
        self._dtype, self._expandable = _checked(dtype), expandable
        if not named:
            self._own += _note_compiled(subject, self._model)
        self._parallel = parallel
        self._cache: StepCache | None = None  # of the denoisers

    @property
    def _mark(self) -> str:
        """What the pipeline, its ranks and its step cache are known by in the cache of footprints."""
        mark = marked(self._own, self._cache)
        return f"{mark} {self._parallel.mark}" if mark and self._parallel is not None else mark

    def on(self, parallel: ContextParallel) -> Measurer:
        """Return one of the same pipeline that measures what a rank of `parallel` does."""
        other = copy.copy(self)
        other._parallel = parallel
        return other

    def with_cache(self, cache: StepCache | None) -> Measurer:
        """Return one of the same pipeline, whose denoisers have that step cache, or none."""
        other = copy.copy(self)
        other._cache = cache
        return other

    def measure(
        self, request: Request, call: Given | CallLog | None = None, missing: Missing | None = None
    ) -> Footprint:
        """Return the footprint of the `call` with this `request` (None: with dummy arguments).

        Strip options and variants, which take most of the time, are measured only while `missing` names them for the
        footprint so far (None: all of them).
        """
        return _kept(
            self._mark, request, call, self._model, self._dtype, expandable=self._expandable, missing=missing,
            parallel=self._parallel, cache=self._cache,
        )  # fmt: skip

    def question(self, request: Request) -> dict[str, Any] | None:
        """Return the cache question of a footprint; None if it is not cached."""
        return footprint_question(self._mark, request, self._dtype, expandable=self._expandable) if self._mark else None


def _note_compiled(pipe: object, copied: object) -> str:
    """Note on the components of `copied`, a copy of `pipe` without compiled code, which are compiled; return names."""
    names = [name for name, module in find_components(pipe).items() if compiled_around(module)]
    for name in names:
        vars(find_components(copied)[name])[COMPILED] = True
    return "".join(f" {name} compiled" for name in names)


def _checked(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in DTYPES:
        raise InputError(unknown_name("dtype", dtype, DTYPES), dtype=dtype)
    return dtype


def _kept(
    mark: str,
    request: Request,
    inputs: Any,
    model: Any,
    dtype: str | None = None,
    *,
    expandable: bool = True,
    missing: Missing | None = None,
    parallel: ContextParallel | None = None,
    cache: StepCache | None = None,
) -> Footprint:
    """Return the footprint, from the cache if the model has a `mark` and `inputs` are not extra arguments.

    InputError if extra arguments are not a mapping by name.
    """
    whole = isinstance(inputs, Given | CallLog)  # a call, which `request` describes
    if inputs is not None and not whole and not isinstance(inputs, Mapping):
        raise InputError(f"a pipeline's inputs go by name, not as {type(inputs).__name__}", kind=type(inputs).__name__)

    def measure(missing: Missing) -> Footprint:
        if parallel is not None:
            return measure_rank(_untouched(model), request, inputs, dtype, parallel, missing, expandable=expandable)
        try:
            return _measure_call(model, request, inputs, dtype, expandable, missing, cache=cache)
        except Exception:  # a network that needs tensor values: its logged parts are called instead
            if not isinstance(inputs, CallLog):
                raise
            plain = without_hooks(_untouched(model))
            unable = _find_unable(plain, request, inputs, dtype)
            return _measure_call(plain, request, inputs, dtype, expandable, missing, unable)

    def measured(missing: Missing) -> Footprint:
        return measure(missing).model_copy(update={"from_call_log": isinstance(inputs, CallLog)})

    wanted = missing or (lambda footprint: footprint.not_measured)
    if (inputs and not whole) or not mark:
        return measured(wanted)
    if request.backward == "parameters":
        mark += _trained(model)
    question = footprint_question(mark, request, dtype, expandable=expandable)
    known = lookup(Footprint, question)
    if known is None:
        return keep_footprint(measured(wanted), question)
    if wanted(known):
        return keep_footprint(measured(lambda more: wanted(more.merged_with(known))), question)
    return known


def _trained(model: Any) -> str:
    """Which parameters of a live pipeline require gradients, as a digest; "" for a folder or a known model: all."""
    if isinstance(model, str | ModelFolder):
        return ""
    parts = find_components(model).items()
    named = (
        f"{part}.{name}" for part, module in parts for name, each in module.named_parameters() if each.requires_grad
    )
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


@collecting_rarely()
def _measure_call(
    model: Any,
    request: Request,
    inputs: CallInputs,
    dtype: str | None,
    expandable: bool,
    missing: Missing,
    unable: Collection[tuple[str, str]] = (),
    cache: StepCache | None = None,
) -> Footprint:
    precision, work = getattr(torch, dtype) if dtype else None, ProgressTracker(PLAYING)
    with unlimited_card(ANY_CARD) as card, forking():
        simulation = SimulationRun(
            _untouched(model), card, {"level": 0}, request, precision, unable, keeps_gradients=False, cache=cache
        )
        profiler, simulator = CallProfiler(card, expandable=expandable), VariantSimulator(simulation, unable)
        with ExitStack() as undo:
            strip_profiles = AutoencoderStripProfiles(simulation.components, undo, expandable=expandable)
            profiler.follow(simulation.components, undo, simulation.differentiated)
            simulation.tell_of_caches(profiler)
            simulator.replay.listen(profiler)
            work.did(BUILDING)
            simulation.run(inputs)
            made = with_gradients(inspect_pipeline(simulation.pipe), simulation.differentiated)
            phases = profiler.phases()
        work.did(PLAYING - BUILDING)
        expected: set[str] = set()
        footprint = made.model_copy(
            update={
                "request": simulation.request,
                "steps": steps_of(simulation.pipe, simulation.request),
                "phases": phases,
                "not_measured": OPTIONAL_PARTS,
            }
            | ({"caches": simulation.caches, "kept": simulation.fitted.report().trace.caches} if cache else {})
        )
        while wanted := missing(footprint):
            work.expect(sum(SIZES[part] for part in wanted if part not in expected))
            expected.update(wanted)
            before = footprint.not_measured
            if (part := wanted[0]) in STRIP_OPTIONS:
                footprint = strip_profiles.with_strips(footprint, part)
            else:
                variants = measure_variants(footprint, lambda each: simulator.phases(each, inputs, profiler))
                left = tuple(other for other in footprint.not_measured if other != part)
                footprint = footprint.model_copy(update={"variants": variants, "not_measured": left})
            work.did(sum(SIZES[part] for part in set(before).difference(footprint.not_measured)))
        return footprint


def _find_unable(model: Any, request: Request, log: CallLog, dtype: str | None) -> set[tuple[str, str]]:
    """Return the components and methods of a logged call that cannot run on shapes alone."""
    with unlimited_card(ANY_CARD) as card:
        simulation = SimulationRun(
            _untouched(model), card, {"level": 0}, request, getattr(torch, dtype) if dtype else None
        )
        return simulation.find_unable(log)


def _untouched(model: Any) -> Any:
    """`model` for one simulation, which modifies it: a pipeline is copied."""
    return model if isinstance(model, str | ModelFolder) else meta_copy(model)
