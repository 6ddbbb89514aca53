"""Simulate a pipeline call on a simulated card, without weights and without hardware."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.fitting import fit
from tightfit.catalog.known import known_model
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.checkpoint.loading import quietly
from tightfit.errors import PlanError, unknown_name
from tightfit.measure.build_models import build_known
from tightfit.measure.call_log import CallLog
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.denoisers import find_denoisers
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components, find_role, inspect_pipeline
from tightfit.measure.repeated import Repeater
from tightfit.run.argument_values import Given
from tightfit.run.call_arguments import NAMES, call_arguments, dummy_inputs, guidance_of
from tightfit.run.count import capacity_of, main_dtype
from tightfit.run.differentiated_calls import DifferentiatedCalls, require_gradients
from tightfit.run.host_seconds import HostSeconds
from tightfit.run.models import stored_dtype
from tightfit.run.pass_replay import PassReplayer
from tightfit.run.prompt import Prompt
from tightfit.run.steps import steps_of
from tightfit.run.unlimited_cards import unlimited_cards
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction, Trace
from tightfit.schema.step_cache import StepCache
from tightfit.simulator.allocator_replay import least_capacity
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.operations import NAME

__all__ = ["Inputs", "SimulationRun", "pipeline_for", "simulate_call"]


Inputs = Mapping[str, Any] | Given | CallLog | None  # of a call: extra arguments, all arguments, or its log

# in messages about the dummy prompt, and about what the pipeline does itself (SDXL upcasts its autoencoder)
_OF_KERNELS = "Mismatch dtype between input and weight"  # torch's, once a process: the call itself has it too
_EXPECTED = ("deprecated", "truncated", "should be kept in float32")


class SimulationRun:
    """A pipeline without weights under a plan on `card`, and on other cards in use if the plan names them.

    `model` is a known model's name or a checked folder, both computed in `dtype`, or a live pipeline's meta copy.
    Fields that `request` leaves open are those of a known model's usual request, or the pipeline's defaults. InputError
    for unknown names, ModelError for a folder that makes no pipeline, RequestError and PlanError for invalid values.
    """

    def __init__(
        self,
        model: Any,
        card: SimulatedCard,
        choices: Plan | dict[str, Any],
        request: Request,
        dtype: torch.dtype | None = None,
        unable: Collection[tuple[str, str]] = (),
        *,
        keeps_gradients: bool = True,
        parallel: ContextParallel | None = None,
        cache: StepCache | None = None,
    ) -> None:
        """`unable`: components and methods that cannot run on shapes, see `Repeater`; `cache`: that of denoisers.

        `keeps_gradients`: those of parameters stay until the end of their backward pass, on the parameters' device.
        `parallel`: the ranks of which `card` is one.
        """
        # on a CPU, models that are loaded here compute in float32, as in `tightfit run`
        usual = torch.float32 if card.accelerator.is_cpu else None
        self.pipe, self.request = pipeline_for(model, request, dtype or usual)
        self.card = card
        self.pipe.set_progress_bar_config(disable=True)
        self.components = find_components(self.pipe)
        denoisers = {name: part for name, part in self.components.items() if find_role(name, part) == "denoiser"}
        if self.request.backward is not None:
            require_gradients(denoisers, self.request)
        ranks = parallel and parallel.simulated(card)
        self.caches = {} if cache is None else dict.fromkeys(find_denoisers(self.components), cache)
        if self.caches:
            choices = {"components": {name: {"cache": cache} for name in self.caches}} | dict(choices)
        device = f"simulated:{card.index}"
        self.fitted = fit(self.pipe, plan=choices, request=self.request, device=device, parallel=ranks)
        self._repeater = Repeater(self.components, self._device, unable)  # before others replace methods
        self.denoisers: dict[str, PassReplayer] = {}
        self.differentiated: dict[str, DifferentiatedCalls] = {}
        for name, part in denoisers.items():
            kept = self.fitted.session.caches.get(name)
            replayer = partial(PassReplayer, part, self.fitted.recorder, card, cache=kept)
            streams = self.fitted.plan.components[name].placement == "stream"
            if self.request.backward is None:
                part.forward = self.denoisers[name] = replayer(streams=streams)
            else:
                calls = DifferentiatedCalls(
                    part, card, of_inputs=self.request.backward == "inputs", keeps=keeps_gradients
                )
                calls.replayer = self.denoisers[name] = replayer(streams=streams, call=calls.differentiated)
                self.differentiated[name] = calls

    def tell_of_caches(self, profiler: CallProfiler) -> None:
        """Let `profiler` tell calls apart in which step caches leave out work, and when that is decided."""
        caches = self.fitted.session.caches
        if caches:
            profiler.kind_of = lambda name, *given: caches[name].kind_of_next(*given) if name in caches else None
        for cache in caches.values():
            cache.on_leave_out = profiler.left_out

    def run(self, inputs: Inputs = None) -> tuple[str, ...]:
        """Simulate one call and return diffusers' messages (e.g. on a number that it rounds).

        `inputs`: extra arguments by name beside the request's, all arguments of a call, or a log of component calls.
        """
        for replayer in self.denoisers.values():
            replayer.forget()
        with torch.no_grad(), quietly() as messages, _draws_kept():
            warnings.filterwarnings("ignore", _OF_KERNELS, UserWarning)
            if isinstance(inputs, Given):
                self.pipe(**_as_tensors(self.pipe, inputs.simulation_copy(self._device)))
            elif isinstance(inputs, CallLog):
                for done in inputs.passes:
                    self._repeater.repeat(done)
            else:
                self._make_up(inputs or {})
        return tuple(dict.fromkeys(line for line in messages if not any(word in line for word in _EXPECTED)))

    def _make_up(self, given: Mapping[str, Any]) -> None:
        pictures, left = dummy_inputs(self.pipe, self.request, given)
        prompted = "prompt" in inspect.signature(type(self.pipe).__call__).parameters
        arguments = call_arguments(self.pipe, Prompt(PROMPT, seed=0) if prompted else None, left)
        self.pipe(**arguments | pictures | {"output_type": "pt"} | dict(given))

    def find_unable(self, log: CallLog) -> set[tuple[str, str]]:
        """Return components and methods of a logged call that cannot run as a whole. Nothing can be simulated after."""
        with torch.no_grad(), quietly(), _draws_kept():
            return self._repeater.find_unable(log)

    @property
    def _device(self) -> torch.device:
        return torch.device(NAME, self.card.index)


def _without_weights(model: Any, dtype: torch.dtype | None) -> tuple[Any, Request]:
    """The pipeline in `dtype` (None: as it is usually loaded), and its usual request."""
    if isinstance(model, ModelFolder):
        return build_folder(model, dtype or getattr(torch, stored_dtype(model.components))), Request()
    if isinstance(model, str):
        known = known_model(model)
        with quietly():  # diffusers' notices on classes that its own networks still use
            return build_known(known, dtype), known.request
    return model, Request()


def pipeline_for(model: Any, request: Request, dtype: torch.dtype | None) -> tuple[Any, Request]:
    """Return the pipeline of `model` without weights, and `request` with its open fields as `SimulationRun` fills them.

    `dtype`: of a known model or a folder; None: as it is usually loaded.
    """
    pipe, default = _without_weights(model, dtype)
    return pipe, _filled(pipe, request, default)


def _as_tensors(pipe: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with tensors as the output type instead of images or arrays, which need values."""
    taken = inspect.signature(type(pipe).__call__).parameters
    if "output_type" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        default = taken["output_type"].default if "output_type" in taken else "pil"
        if arguments.get("output_type", default) in ("pil", "np", "numpy"):
            arguments["output_type"] = "pt"
    return arguments


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Restore this process's random generators (torch's on the CPU, Python's, NumPy's) after the block."""
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def _filled(pipe: Any, request: Request, default: Request) -> Request:
    """`request`, with open fields from the model's `default` request if its pipeline accepts them."""
    taken = inspect.signature(type(pipe).__call__).parameters
    fields = {name: value for name, value in default if value is not None and NAMES.get(name, name) in taken}
    if request.trains and (guidance := guidance_of(pipe, request)) is not None:
        fields["guidance"] = guidance
    arguments = {name: value for name, value in default.arguments.items() if name in taken} | request.arguments
    given = {name: value for name, value in request if value is not None}
    return Request(**fields | given | {"arguments": arguments})


def simulate_call(
    model: str | ModelFolder,
    accelerator: Accelerator,
    choices: dict[str, Any],
    request: Request,
    *,
    others: Sequence[Accelerator] = (),
    title: str | None = None,
    card: str | None = None,
    time_scales: Mapping[str, float] | None = None,
) -> Prediction:
    """Predict the call `request` of `model`, a known one's name or a checked folder, under `choices` of Plan fields.

    It runs on `accelerator`; with `others`, each component runs on the device that the choices name. Fields that
    `request` leaves open are those of a known model's usual request, or the pipeline's defaults. The prediction names
    the model `title` and the accelerators `card`. Phases take `time_scales` times as long, by name. InputError for
    unknown names, ModelError for a folder that makes no pipeline, RequestError and PlanError for invalid values.
    """
    all_of_them, shares = (accelerator, *others), not accelerator.is_cpu  # not on a CPU: a card, named "cuda:0"
    ours = [each.name for each in all_of_them] if others else ["cuda:0" if shares else "cpu"]
    theirs = [f"simulated:{index}" for index in range(len(ours))]
    chosen = Plan.from_mapping({"device": ours[0]} | choices)
    if chosen.device not in ours:
        raise PlanError(unknown_name("device", chosen.device, ours), device=chosen.device)
    with unlimited_cards(all_of_them) as cards:
        simulated = cards[ours.index(chosen.device)]
        simulation = SimulationRun(model, simulated, _renamed(chosen, dict(zip(ours, theirs, strict=True))), request)
        recorder = simulation.fitted.recorder
        simulated.kernel_callbacks.append(lambda _: recorder.sample())
        if time_scales:
            simulated.kernel_callbacks.append(
                lambda _: simulated.set_time_scale(time_scales.get(recorder.live().phase, 1.0))
            )
        simulated.kernel_callbacks.append(host := HostSeconds(simulated, recorder))
        messages = simulation.run()
        host_seconds = host.by_phase()
    called = dict(zip(theirs, ours, strict=True))
    plan, trace = _renamed(simulation.fitted.plan, called), simulation.fitted.report().trace
    capacities = {name: capacity_of(plan, each) for name, each in zip(ours, all_of_them, strict=True)}
    needed = {name: _needed(each, trace, plan) for name, each in zip(ours, cards, strict=True)}
    name = card or accelerator.product_name or accelerator.name
    return Prediction(
        model=title or (model if isinstance(model, str) else model.path.name),
        card=name,
        capacity=capacities[plan.device],
        other_devices={other: capacity for other, capacity in capacities.items() if other in plan.devices[1:]},
        needed_bytes=needed[plan.device],
        fits=all(needed[each] <= capacity for each, capacity in capacities.items()),
        plan=plan,
        host_seconds=host_seconds,
        simulated=True,
        trace=_on(trace.model_copy(update={"notes": (*trace.notes, *messages)}), name, called),
        dtype=main_dtype(inspect_pipeline(simulation.pipe).components),
        steps=steps_of(simulation.pipe, simulation.request),
    )


def _needed(card: SimulatedCard, trace: Trace, plan: Plan) -> int:
    """Least bytes of `card` for its call; on a CPU, which has no segments, bytes of the tensors."""
    if card.accelerator.is_cpu:
        return max(phase.peak_reserved for phase in trace.phases)
    return least_capacity(card.allocator.history, expandable=plan.expandable_segments)


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """`plan` with its devices renamed by `names`."""

    def keyed(sizes: Mapping[str, int]) -> dict[str, int]:
        return {names.get(name, name): size for name, size in sizes.items()}

    changes: dict[str, Any] = {"device": names.get(plan.device, plan.device)}
    changes["components"] = {
        name: part.model_copy(update={"device": names.get(part.device, part.device)}) if part.device else part
        for name, part in plan.components.items()
    }
    if plan.budget is not None and plan.budget.devices:
        changes["budget"] = plan.budget.model_copy(update={"devices": keyed(plan.budget.devices)})
    if plan.forecast:
        forecast = (phase.model_copy(update={"other_devices": keyed(phase.other_devices)}) for phase in plan.forecast)
        changes["forecast"] = tuple(forecast)
    return plan.model_copy(update=changes)


def _on(trace: Trace, name: str, names: Mapping[str, str]) -> Trace:
    """`trace` of a device called `name`, with the other devices renamed by `names`."""
    phases = (
        phase.model_copy(update={"other_devices": {names[other]: peak for other, peak in phase.other_devices.items()}})
        for phase in trace.phases
    )
    return trace.model_copy(update={"device": name, "rss_peak_bytes": 0, "phases": tuple(phases)})
