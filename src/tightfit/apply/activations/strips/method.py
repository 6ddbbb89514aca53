"""An autoencoder's encode or decode, made to run in strips of rows with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.apply.activations.exporting import HERE
from tightfit.apply.activations.outputs import take_apart
from tightfit.apply.activations.strips.capture import NotTakenApart, capture, without_weights
from tightfit.apply.activations.strips.course import Course, find_course
from tightfit.apply.activations.strips.runner import Runner
from tightfit.apply.activations.strips.weights import LiveWeights
from tightfit.decisions import Maps
from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder

__all__ = ["NotAlone", "Strips"]


class NotAlone(Exception):
    """An item of several was given to a method that has to be given all of them."""


@dataclass(frozen=True)
class _Prepared:
    """How calls with inputs of certain shapes are run, and their results put together."""

    course: Course
    weights: LiveWeights
    rebuild: Callable[[Sequence[torch.Tensor]], Any]


class Strips:
    """Runs methods of one autoencoder in strips: at most `working` bytes for them, beside the maps that are kept.

    `kind` is the class that the module had before anybody fitted it. What cannot be taken apart is left to
    `otherwise`, and the recorder is told why.
    """

    def __init__(self, kind: type[nn.Module], working: int, maps: Maps, device: Device, recorder: Recorder) -> None:
        self._kind, self._working, self._maps = kind, working, maps
        self._device, self._recorder = device, recorder
        self._known: dict[Any, _Prepared | str] = {}  # or why not, by kind of call

    def bound(
        self, module: nn.Module, method: str, otherwise: Callable[..., Any], *, alone: bool = True
    ) -> Callable[..., Any]:
        """`module`'s method in strips; `otherwise` is how else it is done.

        Not `alone`, its inputs are one item of several; then NotAlone is raised, before anything is done, where it
        cannot be done in strips, or draws noise (which it would draw once for all of them).
        """

        def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            learning = torch.is_grad_enabled() or torch.is_autocast_enabled(first.device.type)
            prepared = None if learning else self._prepare(module, method, first, args, kwargs)
            if not alone and (not isinstance(prepared, _Prepared) or prepared.course.graph.program.draws_noise):
                raise NotAlone
            if isinstance(prepared, _Prepared):
                return self._run(prepared, first, args, kwargs)
            if prepared is not None:
                self._recorder.note(f"{method} runs whole: {prepared}")
            return otherwise(first, *args, **kwargs)

        return run

    def _run(self, prepared: _Prepared, first: torch.Tensor, args: Any, kwargs: Any) -> Any:
        inputs = [first, *(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor))]
        course = prepared.course
        runner = Runner(course.graph, course.in_host, self._device, prepared.weights, self._recorder)
        return prepared.rebuild(runner.run(inputs, course.stages))

    def _prepare(self, module: nn.Module, method: str, first: torch.Tensor, args: Any, kwargs: Any) -> _Prepared | str:
        leaves, form = tree_flatten((args, kwargs))
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in (first, *leaves))
        key = method, str(form), shapes
        if key not in self._known:
            try:
                with self._recorder.uncounted():
                    self._known[key] = self._take_apart(module, method, first, leaves, form)
            except NotTakenApart as reason:
                self._known[key] = str(reason)
        return self._known[key]

    def _take_apart(
        self, module: nn.Module, method: str, first: torch.Tensor, leaves: list[Any], form: Any
    ) -> _Prepared:
        double = without_weights(module, self._kind)
        rebuild: list[Callable[[Sequence[torch.Tensor]], Any]] = []

        def call(double: Any, first: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
            left = iter(others)
            args, kwargs = tree_unflatten([next(left) if isinstance(x, torch.Tensor) else x for x in leaves], form)
            tensors, together = take_apart(getattr(double, method)(first, *args, **kwargs))
            rebuild[:] = [together]
            return tensors

        given = [first, *(x for x in leaves if isinstance(x, torch.Tensor))]
        program = capture(double, call, [torch.empty(x.shape, dtype=x.dtype, device=HERE) for x in given])
        course = find_course(program, self._working, self._maps)
        return _Prepared(course, LiveWeights(module, program), rebuild[0])
