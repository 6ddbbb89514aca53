"""Lines of a batch: the requests that a user writes, and the records of finished ones. Does not import torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict, field_validator

from tightfit.schema.base import Count, Real, Record
from tightfit.schema.request import Request

__all__ = ["BatchRecord", "PictureFile", "PromptLine"]

LONGEST_NAME = 200  # bytes: file systems take 255, of which numbers and the suffix need some
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]


class PromptLine(Request):
    """One line of a file of requests: the fields of a Request, and what to draw under which name.

    `arguments` are other arguments of the pipeline's call, as they are given to it. Invalid: RequestError.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: Seed | None = None
    name: str | None = None  # of the output file, without its suffix

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is None:
            return None
        name = value[:-4] if value.lower().endswith(".png") else value
        plain = name.isprintable() and not set(name) & set('/\\:*?"<>|') and name == name.strip(". ")
        if not name or not plain or len(name.encode(errors="replace")) > LONGEST_NAME:
            raise ValueError(
                f"name {value!r:.60} is no plain file name: letters, digits, spaces, - and _ are right, no / "
                f"and no dot at either end, at most {LONGEST_NAME} bytes"
            )
        return name

    @field_validator("backward")
    @classmethod
    def _no_backward(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(f"backward={value} is for training: a batch draws pictures, leave it out")
        return value


class PictureFile(Record):
    """A written file, and what shows that it is unchanged."""

    name: str
    bytes: Count
    sha256: str


class BatchRecord(Record):
    """One request that was finished, or that failed: a line of results.jsonl."""

    name: str  # of the request
    digest: str  # of all that its pictures depend on
    prompt: str
    seed: Count
    files: tuple[PictureFile, ...] = ()
    seconds: Real = 0.0  # of the call, with its planning, without loading the model
    predicted_peak_bytes: Count | None = None  # None: the plan has no forecast
    measured_peak_bytes: Count | None = None
    device: str | None = None
    host: str | None = None
    finished: str  # date and time, UTC
    failure: str | None = None  # type of the error
    message: str | None = None  # of the error
