"""Predictions kept on disk, so that the same question is answered at once. Sees no torch: that alone takes seconds.

The key is everything that an answer depends on: the question, the catalog, the code, and the versions of what it
stands on. A file that cannot be read is no answer; one that cannot be written is no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from tightfit.errors import TightfitError
from tightfit.records import Prediction
from tightfit.run.files import replacing

__all__ = ["cache_folder", "remembered"]

_LIBRARIES = ("diffusers", "torch", "transformers")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"


def remembered(question: dict[str, Any], answer: Callable[[], Prediction]) -> Prediction:
    """The answer to `question` (plain values) from the cache; else `answer()`, which is then kept."""
    file = cache_folder() / "predictions" / f"{_key(question)}.json"
    with contextlib.suppress(OSError, UnicodeDecodeError, TightfitError):
        return Prediction.from_text(file.read_text())
    prediction = answer()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(prediction.to_json())
    return prediction


def _key(question: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    package = Path(str(files("tightfit")))
    for path in sorted(path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
