"""A zip archive of text and tensor parts; damage is detected when it is read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from tightfit.files import replacing

__all__ = ["DAMAGED", "part_of", "write_bundle"]

LARGEST_PART = 2**30  # bytes; the graph of a large denoiser takes a few MB

# exceptions raised by reading a file that is incomplete, damaged or no bundle
DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError, SafetensorError)


def write_bundle(path: Path, parts: Mapping[str, str | bytes]) -> None:
    """Write `parts`, by name, to the file `path`, completely or not at all. OSError on failure."""
    with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, content in parts.items():  # no timestamp: equal content gives equal bytes
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def part_of(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the part `name`; raise one of DAMAGED if it is missing, broken or larger than LARGEST_PART."""
    size = archive.getinfo(name).file_size
    if size > LARGEST_PART:
        raise ValueError(f"{name} would have {size} bytes")
    return archive.read(name)
