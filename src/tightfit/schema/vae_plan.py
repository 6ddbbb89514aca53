"""How autoencoders process their images, as a part of a plan. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from tightfit.errors import PlanError
from tightfit.schema.base import Record, Size
from tightfit.schema.footprint import FeatureMaps, Phase, StripProfile
from tightfit.units import format_bytes

__all__ = ["VaePlan"]


class VaePlan(Record):
    """How autoencoders process their images, in `encode` and in `decode`."""

    slicing: bool = False  # one item of a batch at a time
    # exact tiling: bytes for strips of rows, or of a rank's rows, beside the feature maps kept between them
    strips: Size | None = None
    # where those are kept, if ranks do not share them; "recompute": at most `strips` bytes of them
    feature_maps: FeatureMaps = "device"
    tile: Annotated[int, Strict(), Field(ge=16)] | None = None  # blended tiling: side in pixels; None: whole images
    shared: bool = True  # whether ranks that share rows share these, too; else each rank processes all of an image
    overlap: Annotated[float, Strict(), Field(ge=0, le=0.5)] = 0.25  # share of a tile shared with its neighbour

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        maps = self.feature_maps
        if self.strips is None and maps != "device":
            raise PlanError(f"vae.feature_maps={maps} needs vae.strips too, e.g. vae.strips=256MB", feature_maps=maps)
        if self.tile is None and "overlap" in self.model_fields_set and self.overlap != 0.25:
            raise PlanError(
                f"vae.overlap={self.overlap} needs a tile size too, e.g. vae.tile=512", overlap=self.overlap
            )
        return self

    @property
    def splits(self) -> bool:
        """Whether batches or images are processed in parts."""
        return self.slicing or self.strips is not None or self.tile is not None

    def strip_profile(self, phase: Phase) -> StripProfile | None:
        """Return the strip option that this plan selects in `phase`; None if it selects none, or an unmeasured one."""
        wanted = self.strips, self.feature_maps
        return next((each for each in phase.strip_options if (each.strip_bytes, each.feature_maps) == wanted), None)

    @property
    def described(self) -> str:
        """How images are processed, on one line."""
        text = f"tiles of {self.tile} px" if self.tile else "whole images"
        if self.strips is not None:
            kept = {"device": "on the device", "host": "in host memory", "recompute": "as far as they fit"}
            text = f"exact strips within {format_bytes(self.strips)}, feature maps kept {kept[self.feature_maps]}"
            text += f", tiles of {self.tile} px where strips are not possible" if self.tile else ""
        text = f"{text}, one item at a time" if self.slicing or self.strips is not None else text
        return text if self.shared else f"{text}, on every rank"
