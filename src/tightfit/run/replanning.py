"""A call of a pipeline that follows a budget's plan → another plan, where it asks for something else.

What the pipeline was like before it was fitted is kept without weights, so that any call can be measured meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tightfit.devices.memory import resident_bytes
from tightfit.devices.seam import Device
from tightfit.errors import TightfitError
from tightfit.measure.modules import find_components, weight_tensors
from tightfit.plan.planner import make_plan
from tightfit.records import Budget, Footprint, Machine, Plan, Request
from tightfit.run.footprints import measurer_of
from tightfit.run.machines import machine_now, with_less_taken
from tightfit.run.request import NAMES, usual_side
from tightfit.run.wishes import Limits

__all__ = ["Replanner", "request_of"]

LESS = 0.95  # of what a plan wanted that ran out of memory
_PICTURES = ("image", "video", "control_image", "mask_image")  # whose size is that of the call, if it names none


class _Shape(NamedTuple):
    """What decides how many bytes a call takes."""

    height: int | None
    width: int | None
    frames: int | None
    batch: int
    guided: bool | None


class Replanner:
    """Makes plans for a pipeline, as it was when this was made, within the same limits on the same device.

    `made` is one that was made for it already.
    """

    def __init__(self, pipe: Any, limits: Limits, target: Device, made: Plan | None = None) -> None:
        self._limits, self._target, self._own = limits, target, _bytes_of(pipe, target)
        self._measure: Callable[[Request], Footprint] = measurer_of(pipe)
        self._machine: Machine | None = None  # as it was before the pipeline followed any plan
        self._plans: dict[_Shape, Plan] = {}
        if made is not None and made.request is not None:
            self._machine = self._free_machine()
            self._plans[_shape_of(pipe, made.request)] = made

    def plan(self, pipe: Any, request: Request) -> Plan:
        """The plan for `request`, a new one or that which was made before. Raises BudgetTooSmall."""
        shape = _shape_of(pipe, request)
        if shape not in self._plans:
            footprint = self._measure(request)
            self._machine = self._machine or self._free_machine()
            self._plans[shape] = make_plan(footprint, self._machine, *self._limits)
        return self._plans[shape]

    def _free_machine(self) -> Machine:
        """This computer as if the pipeline were not there, of whose weights it has so much now."""
        return with_less_taken(machine_now(self._target), self._own)

    def for_call(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], now: Plan) -> Plan | None:
        """The plan for a call of `pipe` with these arguments; None where the plan that it follows now is for it.

        So is one under which nothing moves and nothing is cut, for a call that asks for less than it was made for.
        """
        asked = request_of(pipe, args, kwargs)
        if asked is None or now.request is None:
            return None
        shape, planned = _shape_of(pipe, asked), _shape_of(pipe, now.request)
        if shape == planned or (_is_whole(now) and _is_within(shape, planned)):
            return None
        return self.plan(pipe, asked)

    def for_less(self, pipe: Any, now: Plan, size: int) -> Plan:
        """The plan for what `now` was made for, within `size` bytes of the device, and less than that needs.

        From now on nothing is planned for more. Raises BudgetTooSmall.
        """
        assert now.request is not None
        told = max((phase.peak_bytes for phase in now.forecast), default=size)
        budget, allow = self._limits
        self._limits = Limits(Budget(device=max(min(size, int(told * LESS)), 1), ram=budget and budget.ram), allow)
        self._plans.clear()
        return self.plan(pipe, now.request)


def request_of(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Request | None:
    """What a call of `pipe` asks for; None where that is nothing that a request could say: the pipeline will tell."""
    try:
        given = inspect.signature(type(pipe).__call__).bind_partial(pipe, *args, **kwargs).arguments
    except TypeError:
        return None
    found = {ours: given[theirs] for ours, theirs in NAMES.items() if theirs in given and ours != "negative prompt"}
    found = {name: value for name, value in found.items() if isinstance(value, int | float)}
    each = next((given[name] for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in given), 1)
    found["batch"] = _prompts(given) * (each or 1)
    if not found.keys() & {"height", "width"}:
        found |= _size_of(given)
    try:
        return Request.from_mapping(found)
    except TightfitError:
        return None


def _bytes_of(pipe: Any, target: Device) -> int:
    """Of the memory of `target`, what the pipeline's own weights take now."""
    tensors = [tensor for module in find_components(pipe).values() for tensor in weight_tensors(module)]
    there = [tensor for tensor in tensors if tensor.device == target.torch_device]
    return sum(tensor.nbytes for tensor in there) if target.separate else resident_bytes(there)


def _prompts(given: Mapping[str, Any]) -> int:
    prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
    if isinstance(prompt, list | tuple):
        return len(prompt)
    return len(embeds) if isinstance(embeds, torch.Tensor) and prompt is None else 1


def _size_of(given: Mapping[str, Any]) -> dict[str, int]:
    """Of the pictures that the call starts from."""
    for name in _PICTURES:
        picture = given.get(name)
        while isinstance(picture, list | tuple) and picture:
            picture = picture[0]
        if isinstance(picture, torch.Tensor) and picture.ndim >= 3:
            return {"height": int(picture.shape[-2]), "width": int(picture.shape[-1])}
        size = getattr(picture, "size", None)
        if isinstance(size, tuple) and len(size) == 2:
            return {"height": size[1], "width": size[0]}
    return {}


def _shape_of(pipe: Any, request: Request) -> _Shape:
    """`request` with what the pipeline makes of that which it leaves open."""
    usual = {name: each.default for name, each in inspect.signature(type(pipe).__call__).parameters.items()}

    def said(name: str) -> Any:
        value = getattr(request, name)
        default = usual.get(NAMES[name])
        return default if value is None and isinstance(default, int | float) else value

    height, width, guidance = said("height"), said("width"), said("guidance")
    if NAMES["height"] in usual and hasattr(pipe, "default_sample_size"):
        height, width = height or usual_side(pipe), width or usual_side(pipe)
    return _Shape(height, width, said("frames"), request.batch, None if guidance is None else guidance > 1)


def _is_whole(plan: Plan) -> bool:
    """Whether nothing could be gained with more room."""
    stays = all(part.placement == "resident" for part in plan.components.values())
    return stays and plan.lossless and not plan.vae.cuts


def _is_within(shape: _Shape, other: _Shape) -> bool:
    """Whether a call of `shape` takes no more than one of the `other`."""
    if shape.guided and other.guided is False:
        return False
    return all(
        less is not None and more is not None and less <= more if less != more else True
        for less, more in zip(shape[:4], other[:4], strict=True)
    )
