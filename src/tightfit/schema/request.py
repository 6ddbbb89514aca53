"""Arguments of one pipeline call that its memory and time depend on. Does not import torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, Strict, field_validator

from tightfit.errors import InputError, RequestError, unknown_name
from tightfit.schema.base import Positive, Real, Record

__all__ = ["Request"]

BACKWARDS = ("inputs", "parameters", "lora")
LORA_RANK, MOST_RANK = 4, 4096

# a call argument: its value, or its kind and size as text
Argument = Annotated[bool, Strict()] | Annotated[int, Strict()] | Annotated[float, Strict()] | str | None


class Request(Record):
    """Arguments of one pipeline call. Omitted fields take the pipeline's own defaults. Invalid: RequestError.

    `arguments` are other arguments of the call, under the pipeline's own names: numbers, bools and None by value
    (`max_sequence_length`, `use_resolution_binning`, `true_cfg_scale`); tensors, images and texts by kind and size
    ("float32 1x4x64x64", "RGB image 512x512", "9 x RGB image 64x64", "text").

    With `backward`, a backward pass follows each denoiser call: "inputs" for gradients of its latents, as guidance in a
    callback needs them; "parameters" for those of all parameters that require them; "lora", or "lora:16", for those of
    a LoRA of that rank (default LORA_RANK) on its attention projections.
    """

    error: ClassVar[type[InputError]] = RequestError

    height: Positive | None = None  # pixels
    width: Positive | None = None  # pixels
    frames: Positive | None = None
    batch: Positive = 1
    steps: Positive | None = None
    guidance: Real | None = None
    backward: str | None = None
    arguments: dict[str, Argument] = Field(default_factory=dict)

    @field_validator("backward")
    @classmethod
    def _known_backward(cls, value: str | None) -> str | None:
        kind, colon, rank = (value or "inputs").partition(":")
        if kind not in BACKWARDS:
            raise ValueError(unknown_name("kind of backward pass", kind, BACKWARDS))
        if colon and (kind != "lora" or not (rank.isascii() and rank.isdigit()) or not 0 < int(rank[:9]) <= MOST_RANK):
            raise ValueError(f"backward={value} is none of inputs, parameters, lora, lora:1 … lora:{MOST_RANK}")
        return value

    @property
    def lora_rank(self) -> int | None:
        """Rank of the LoRA whose gradients `backward` computes; None: not of a LoRA."""
        kind, _, rank = (self.backward or "").partition(":")
        return int(rank or LORA_RANK) if kind == "lora" else None

    @property
    def trains(self) -> bool:
        """Whether `backward` computes gradients of parameters."""
        return self.backward not in (None, "inputs")

    @property
    def size(self) -> str:
        """Image or clip size as text, as far as given: "1280×720, 81 frames"."""
        pixels = f"{self.width}×{self.height}" if self.height and self.width else ""
        return ", ".join(filter(None, (pixels, f"{self.frames} frames" if self.frames else "")))

    @property
    def described(self) -> str:
        """Size, batch and other arguments as text."""
        batch = f"{self.batch} at once" if self.batch > 1 else ""
        others = (f"{name}={value}" for name, value in self.arguments.items())
        backward = f"backward pass for {self.backward}" if self.backward else ""
        return ", ".join(filter(None, (self.size, batch, backward, *others))) or "its usual request"
