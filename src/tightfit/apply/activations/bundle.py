"""A file of several parts, texts and tensors: a zip archive, which knows when it is damaged."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from tightfit.files import replacing

__all__ = ["DAMAGED", "part_of", "write_bundle"]

LARGEST_PART = 2**30  # bytes; the graph of a large denoiser has a few MB

# what reading a file raises that is something else, or not all there
DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError, SafetensorError)


def write_bundle(path: Path, parts: Mapping[str, str | bytes]) -> None:
    """Writes `parts` by their names to the file `path`, whole or not at all. OSError where that cannot be done."""
    with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, content in parts.items():  # without the time: the same bytes whenever it is written
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def part_of(archive: zipfile.ZipFile, name: str) -> bytes:
    """The part `name`; one of DAMAGED where it is not there, broken, or so large that it would fill the memory."""
    size = archive.getinfo(name).file_size
    if size > LARGEST_PART:
        raise ValueError(f"{name} would have {size} bytes")
    return archive.read(name)
