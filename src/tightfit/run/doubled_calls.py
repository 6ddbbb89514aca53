"""A pipeline → which inputs of its denoisers grow with a picture's height, from two simulated calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from tightfit.apply.activations.strips.row_axes import UnsupportedGraph
from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.modules import find_role
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.call_arguments import shape_of, usual_side
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.request import Request

__all__ = ["doubled_inputs_of"]

STEPS = 10  # of the simulated calls: those from a picture leave some out
FRAMES = 17  # of a clip to start from, if the request has no number: what grows with the height is the same for any
BINS = "use_resolution_binning"  # some pipelines replace the height and width by others, unless this is False


class _Enough(Exception):
    """All calls that are wanted were recorded."""


def doubled_inputs_of(pipe: Any, request: Request) -> dict[str, DoubledInputs | str]:
    """Return, by denoiser of `pipe`, which of its inputs double at twice the height; or why that is not known.

    Two calls of `request`, of which one is for twice the height, are simulated up to the autoencoder's decode. Raises
    RequestError where the pipeline does not accept them.
    """
    shape, side = shape_of(pipe, request), usual_side(pipe)
    height, width = shape.height or side, shape.width or side
    arguments = dict(request.arguments)
    taken = inspect.signature(type(pipe).__call__).parameters
    if BINS in taken:
        arguments[BINS] = False
    frames = request.frames or (FRAMES if "video" in taken else None)
    same = {"width": width, "frames": frames, "steps": STEPS, "arguments": arguments}
    calls, twice = (
        _recorded(pipe, request.model_copy(update={"height": each, **same})) for each in (height, 2 * height)
    )
    return {name: _compared(call, twice.get(name)) for name, call in calls.items()}


def _recorded(pipe: Any, request: Request) -> dict[str, ComponentArguments]:
    """Return the first call of each denoiser in a simulated call of `pipe`."""
    found: dict[str, ComponentArguments] = {}
    with unlimited_card(ANY_CARD) as card:
        simulation = SimulationRun(meta_copy(pipe), card, {"level": 0}, request)
        for name, replayer in simulation.denoisers.items():
            _record(simulation.components[name], name, replayer, found)
        for name, part in simulation.components.items():
            if hasattr(part, "decode") and find_role(name, part) == "autoencoder":
                vars(part)["decode"] = _stop
        with contextlib.suppress(_Enough):
            simulation.run()
    return found


def _record(part: Any, name: str, inner: Callable[..., Any], found: dict[str, ComponentArguments]) -> None:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found.setdefault(name, ComponentArguments(args, dict(kwargs)))
        return inner(*args, **kwargs)

    part.forward = forward


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _Enough


def _compared(one: ComponentArguments, other: ComponentArguments | None) -> DoubledInputs | str:
    if other is None:
        return "it is not called at twice the height"
    try:
        return DoubledInputs.of(one, other)
    except UnsupportedGraph as reason:
        return str(reason)
