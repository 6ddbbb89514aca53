"""Random generators that a program draws from, reset so that it draws the same numbers again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tightfit.apply.activations.strips.program import Program
from tightfit.devices.device import Device

__all__ = ["rewinder", "usual_generators"]


def rewinder(program: Program, device: Device) -> Callable[[], None] | None:
    """Return a function that resets every generator that `program` may draw from on `device` to its current state.

    None if the state of one of them is not accessible.
    """
    if not program.draws_noise:
        return lambda: None
    usual = usual_generators(device)
    if usual is None:
        return None
    own = (node.kwargs.get("generator") for node in program.nodes)
    states = [(it, it.get_state()) for it in (*usual, *own) if it is not None]

    def rewind() -> None:
        for generator, state in states:
            generator.set_state(state)

    return rewind


def usual_generators(device: Device) -> list[torch.Generator] | None:
    """Return the CPU's default generator, and the device's if it has its own; None if that is unknown."""
    place = device.torch_device
    if place.type == "cpu" or device.kind == "simulated":  # a simulated card draws from the CPU's
        return [torch.default_generator]
    offered = getattr(getattr(torch, place.type, None), "default_generators", ())
    return [torch.default_generator, offered[place.index or 0]] if len(offered) > (place.index or 0) else None
