"""What to draw: the texts and the seed of a call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tightfit.errors import RequestError

__all__ = ["Prompt", "slug_of"]


@dataclass(frozen=True)
class Prompt:
    """Prompt texts, and the seed that makes the call reproducible."""

    text: str
    seed: int
    negative: str | None = None

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise RequestError("the prompt is empty: say what to draw, e.g. 'a red circle on the left'")
        for text in (self.text, self.negative or ""):
            if text != text.encode(errors="ignore").decode():  # bytes of a command line that are no UTF-8
                raise RequestError(f"the prompt is no text in UTF-8: {text[:40]!a}")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"the seed must be between 0 and 2⁶³ - 1, not {self.seed}", seed=self.seed)


def slug_of(text: str) -> str:
    """Return a file name made from a prompt, without suffix."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "picture"
