"""Cache of predictions and footprints on disk.

Does not import torch, which takes seconds. The key covers all that an answer depends on: the question, the catalog,
the code, and the versions of its libraries. A file that cannot be read counts as missing; a failed write is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tightfit.errors import TightfitError
from tightfit.files import cache_folder, code_mark, read_regular, replacing
from tightfit.schema.base import Record
from tightfit.schema.footprint import Footprint
from tightfit.schema.request import Request
from tightfit.schema.step_cache import StepCache

__all__ = [
    "Missing",
    "cached",
    "footprint_question",
    "keep_footprint",
    "key_of",
    "lookup",
    "recalled_footprint",
]

Missing = Callable[[Footprint], Sequence[str]]  # names of parts that a footprint lacks and its user needs
Answer = TypeVar("Answer", bound=Record)


def cached(kind: type[Answer], question: dict[str, Any], answer: Callable[[], Answer]) -> Answer:
    """Return the cached answer to `question` (plain values); if there is none, cache and return `answer()`."""
    known = lookup(kind, question)
    if known is not None:
        return known
    found = answer()
    keep(found, question)
    return found


def keep(answer: Record, question: dict[str, Any]) -> None:
    """Write `answer` to the cache, if possible."""
    file = _file(type(answer), question)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(answer.model_dump(mode="json", exclude_defaults=True)))


def lookup(kind: type[Answer], question: dict[str, Any]) -> Answer | None:
    """Return the cached answer to `question`; None if there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError, TightfitError):
        return kind.from_text(read_regular(_file(kind, question)))
    return None


def _file(kind: type[Record], question: dict[str, Any]) -> Path:
    return cache_folder() / f"{kind.__name__.lower()}s" / f"{key_of(question)}.json"


def marked(mark: str, cache: StepCache | None) -> str:
    """Return `mark`, that of a model, for one whose denoisers have a step cache; "" stays."""
    return f"{mark} {cache.to_json()}" if mark and cache is not None else mark


def footprint_question(mark: str, request: Request, dtype: str | None, *, expandable: bool = True) -> dict[str, Any]:
    """Return the question of a call's footprint: of the model with this `mark`, computed in `dtype`."""
    return {"model": mark, "request": request.to_mapping(), "dtype": dtype, "expandable": expandable}


def recalled_footprint(question: dict[str, Any], missing: Missing | None = None) -> Footprint | None:
    """Return the cached answer to a `footprint_question`; None if parts are `missing` in it (argument None: any)."""
    known = lookup(Footprint, question)
    if known is None or (known.not_measured if missing is None else missing(known)):
        return None
    return known


def keep_footprint(footprint: Footprint, question: dict[str, Any]) -> Footprint:
    """Merge `footprint` with the cached one, which may lack other parts; write and return the result."""
    known = lookup(Footprint, question)
    footprint = footprint if known is None else footprint.merged_with(known)
    keep(footprint, question)
    return footprint


def key_of(question: dict[str, Any]) -> str:
    """Return a digest of `question` (plain values) and of all else that an answer depends on."""
    return hashlib.sha256(f"{json.dumps(question, sort_keys=True)}\0{code_mark()}".encode()).hexdigest()
