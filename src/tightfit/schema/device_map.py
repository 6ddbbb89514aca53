"""Where a user wants components: `device_map` of `fit` and `load`, as a value. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tightfit.schema.base import Record
from tightfit.schema.stores import STORES

__all__ = ["DeviceMap", "Strategy"]

Strategy = Literal["auto", "balanced"]


class DeviceMap(Record):
    """Where components compute and where their weights are, as far as a user fixed it; the planner decides the rest.

    `strategy` chooses among several cards: "auto" takes the fastest plan, and leaves cards alone that gain nothing;
    "balanced" takes, of the plans that are hardly slower, the one whose fullest card is least full.

    `components` maps a component's name to a card ("cuda:1"), on which it computes, or to a weight store ("cpu",
    "disk"), in which its weights are while it does not run. `ignored` are devices that `max_memory` names and that
    cannot be used here.
    """

    strategy: Strategy = "auto"
    components: dict[str, str] = Field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def cards(self) -> dict[str, str]:
        """Cards on which components have to compute, by component."""
        return {name: place for name, place in self.components.items() if place not in STORES}

    @property
    def stores(self) -> dict[str, str]:
        """Stores in which weights have to be, by component."""
        return {name: place for name, place in self.components.items() if place in STORES}

    @property
    def described(self) -> str:
        """What is fixed, on one line, e.g. "unet on cuda:0 and vae on cpu"; "" if nothing is."""
        return " and ".join(f"{name} on {place}" for name, place in self.components.items())
