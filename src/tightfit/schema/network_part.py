"""A later part of a network that is split over devices: from which block on it runs. Does not import torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from tightfit.errors import PlanError
from tightfit.schema.base import Count, Record, Size
from tightfit.schema.stores import OffloadTarget

__all__ = ["PART_FIELDS", "Granularity", "NetworkPart", "Placement"]

Placement = Literal["resident", "offload", "stream"]
Granularity = Literal["block", "layer"]
_STREAMED = ("weight_memory", "granularity", "ring_buffer", "resident_layers")
# fields of a ComponentPlan that each part has of its own
PART_FIELDS = ("placement", "offload_to", *_STREAMED)


class NetworkPart(Record):
    """The blocks from `first` on, up to the first of the next part; `first` alone may be given as text.

    Where its weights are: fields left out are the component's.
    """

    first: str  # dotted path of a block
    outside: tuple[str, ...] = ()  # dotted paths of modules outside of blocks that run after its blocks
    placement: Placement | None = None
    offload_to: OffloadTarget | None = None
    weight_memory: Size | None = None
    granularity: Granularity | None = None
    ring_buffer: Count | None = None
    resident_layers: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, fields: Any) -> Any:
        return {"first": fields} if isinstance(fields, str) else fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        streamed = [name for name in _STREAMED if getattr(self, name) is not None]
        if streamed and self.placement not in (None, "stream"):
            raise PlanError(f"{streamed[0]} only means something with placement=stream", field=streamed[0])
        return self

    def fields(self, placement: Placement) -> dict[str, object]:
        """Return its values for a ComponentPlan; `placement` is that of the component."""
        streamed = {name: getattr(self, name) for name in _STREAMED}
        store: dict[str, object] = {} if self.offload_to is None else {"offload_to": self.offload_to}
        if self.placement not in (None, placement) or placement != "stream":
            return {"placement": self.placement or placement, **streamed} | store
        return {name: value for name, value in streamed.items() if value is not None} | store

    def described(self, device: str) -> str:
        """Which blocks it has on `device`, and how their weights are placed where that is not as the component's."""
        return f"{self.first} and later on {device}" + (f" ({self.placement})" if self.placement else "")
