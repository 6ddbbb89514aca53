"""A pipeline whose rows several ranks share → the Footprint of one rank: its memory, its work, and what it sends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.module_hooks import watch
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.graph_layers import follow_graph
from tightfit.measure.modules import inspect_pipeline
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.answer_cache import Missing
from tightfit.run.collecting_rarely import collecting_rarely
from tightfit.run.simulate import Inputs, SimulationRun
from tightfit.run.steps import steps_of
from tightfit.run.strip_profiles import AutoencoderStripProfiles
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.footprint import STRIP_OPTIONS, Footprint
from tightfit.schema.request import Request

__all__ = ["measure_rank"]


@collecting_rarely()
def measure_rank(
    model: Any, request: Request, inputs: Inputs, dtype: str | None, parallel: ContextParallel, missing: Missing, *,
    expandable: bool,
) -> Footprint:  # fmt: skip
    """Measure a call on this rank of `parallel`, as `measure_footprint` does without ranks; `model` is modified.

    What the other ranks send has no values. There are no variants, and strips only for autoencoders that every rank
    runs whole, as far as they are `missing`: ranks share what these would split.
    """
    with unlimited_card(ANY_CARD) as card:
        precision = getattr(torch, dtype) if dtype else None
        ranks: dict[str, Any] = {"keeps_gradients": False, "parallel": parallel}
        choices = {"level": 0, "vae": parallel.autoencoders.fields}
        simulation = SimulationRun(model, card, choices, request, precision, **ranks)
        profiler = CallProfiler(card, expandable=expandable)
        with ExitStack() as undo:
            strips = AutoencoderStripProfiles(
                {} if parallel.autoencoders.shared else simulation.components, undo, expandable=expandable
            )
            profiler.follow(simulation.components, undo)
            for name, module in simulation.components.items():
                follow_graph(profiler, name, module, watch, undo)
            simulation.run(inputs)
            found = inspect_pipeline(simulation.pipe)
            called, steps = simulation.request, steps_of(simulation.pipe, simulation.request)
            measured = {"request": called, "steps": steps, "phases": profiler.phases()}
        if parallel.autoencoders.shared:
            return found.model_copy(update=measured)
        footprint = found.model_copy(update=measured | {"not_measured": tuple(STRIP_OPTIONS)})
        while wanted := missing(footprint):
            footprint = strips.with_strips(footprint, wanted[0])
        return footprint
