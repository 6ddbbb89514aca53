"""Random numbers that a program draws, drawn again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tightfit.apply.activations.strips.program import Program
from tightfit.devices.device import Device

__all__ = ["rewinder", "usual_generators"]


def rewinder(program: Program, device: Device) -> Callable[[], None] | None:
    """Puts every generator from which `program` may draw on `device` back to where it is now.

    None where one of them is out of reach.
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
    """The CPU's, and the device's where it has its own; None where nobody knows that."""
    place = device.torch_device
    if place.type == "cpu" or device.kind == "simulated":  # a simulated card's numbers are the CPU's
        return [torch.default_generator]
    offered = getattr(getattr(torch, place.type, None), "default_generators", ())
    return [torch.default_generator, offered[place.index or 0]] if len(offered) > (place.index or 0) else None
