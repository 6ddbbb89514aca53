"""Images → files, written atomically; and checks of output paths."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tightfit.errors import InputError, RunError
from tightfit.files import check_regular, replacing
from tightfit.run.prompt import slug_of

__all__ = [
    "check_count",
    "check_timeline",
    "check_writable",
    "encoded_picture",
    "numbered",
    "output_paths",
    "save_pictures",
    "writing",
]

MOST = 10_000  # pictures of a call: each is a file that is looked for first


def output_paths(out: Path | None, prompt: str, count: int) -> list[Path]:
    """Return the paths of `count` images: `out`, or unused names made from the prompt.

    If `out` is a folder, such names are used inside it; a file name is numbered if there are several images.
    InputError if `out` is neither a .png file nor a folder, and for more than MOST.
    """
    check_count(count)
    if out is not None and not os.path.isdir(out):
        if out.suffix.lower() != ".png":
            raise InputError(f"--out {out} must be a .png file or a folder that exists", out=str(out))
        return numbered(out, count)
    folder = out or Path()
    stem = slug_of(prompt)
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    tries = (numbered(folder / f"{name}.png", count) for name in names)
    return next(paths for paths in tries if not any(map(os.path.lexists, paths)))


def check_count(count: int) -> None:
    """Raise InputError for a batch of more than MOST pictures."""
    if count > MOST:
        raise InputError(f"a batch of {count:,} is too many: {MOST:,} at the most", batch=count)


def numbered(path: Path, count: int) -> list[Path]:
    """Return the paths of `count` images: `path`, or several with numbers."""
    return [path] if count == 1 else [path.with_name(f"{path.stem}-{index}{path.suffix}") for index in range(count)]


def check_writable(path: Path) -> None:
    """Raise InputError if `path` cannot be written."""
    try:
        check_regular(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}", path=str(path)) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a failure to write `path`, for example on a full disk, as a RunError that names it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error


def check_timeline(path: Path) -> None:
    """Raise InputError if a timeline cannot be written to `path`."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"--timeline {path} must end in .png or .svg", timeline=str(path))
    check_writable(path)


def save_pictures(pictures: list[Any], paths: list[Path], metadata: dict[str, str]) -> None:
    """Save each image (PIL, or a list of PIL images: a video, saved as an animated PNG) with `metadata` as PNG text.

    Either all files are written, or none.
    """
    with contextlib.ExitStack() as whole:
        for picture, path in zip(pictures, paths, strict=True):
            with writing(path):
                _save(picture, whole.enter_context(replacing(path)), metadata)


def encoded_picture(picture: Any, metadata: dict[str, str]) -> bytes:
    """Return the bytes of the file that `save_pictures` would write."""
    file = io.BytesIO()
    _save(picture, file, metadata)
    return file.getvalue()


def _save(picture: Any, file: Path | io.BytesIO, metadata: dict[str, str]) -> None:
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    frames: list[Image.Image] = picture if isinstance(picture, list) else [picture]
    video = {"save_all": True, "append_images": frames[1:], "duration": 125} if len(frames) > 1 else {}
    frames[0].save(file, format="PNG", pnginfo=info, **video)
