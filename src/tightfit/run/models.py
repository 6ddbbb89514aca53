"""A model as users name it (a path, a hub id, or None for the demo model) → a checked folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from safetensors import safe_open

from tightfit.catalog.known import model_called, model_names
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder, check_folder
from tightfit.checkpoint.headers import read_header
from tightfit.errors import ModelError

__all__ = ["DTYPES", "at_home", "find_model", "model_title", "resolve_model", "stored_dtype"]

DTYPES = ("bfloat16", "float16", "float32")  # compute dtypes that users may choose

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_model(name: str | None) -> ModelFolder:
    """Return the checked folder of `name`; None is the demo model. ModelError with one line if there is none."""
    if name is None:
        return check_folder(Path(str(files("tightfit.demo") / "model")))
    path = at_home(Path(name))
    if path.exists() or not _HUB_ID.fullmatch(name):
        return check_folder(path)
    return check_folder(_download(name))


def model_title(name: str | None, folder: ModelFolder) -> str:
    """Return what pictures of `folder`, which users call `name`, say of their model."""
    return "tightfit demo model" if name is None else os.fsencode(folder.path.name).decode(errors="replace")


def at_home(path: Path) -> Path:
    """Return `path` with ~ replaced. ModelError if there is no such user, or the path is longer than any can be."""
    try:
        path = path.expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        said = f"{path} is no folder: {getattr(error, 'strerror', None) or error}"
        raise ModelError(said, path=str(path)) from None
    return path


def resolve_model(name: str | None) -> tuple[str | ModelFolder, str]:
    """Return a known model's name or a checked folder (also of a hub id; None: the demo model), and its cache key."""
    if name in model_names():
        return name, name
    if name is not None and not at_home(Path(name)).exists() and "/" not in name:
        name = model_called(name)
        return name, name
    folder = find_model(name)
    return folder, _fingerprint(folder)


def _fingerprint(folder: ModelFolder) -> str:
    """Digest of all that a prediction for `folder` depends on: everything but the values in its weight files."""
    digest = hashlib.sha256()
    weights = {file for part in folder.components for file in part.weight_files}
    for file in sorted(file for file in folder.path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(folder.path)} {file.stat().st_size}\0".encode())
        if file in weights:
            digest.update(json.dumps(read_header(file)).encode())
        elif file.stat().st_size < 10**8 and file.suffix in (".json", ".txt", ".model", ".jinja"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _download(name: str) -> Path:
    """Download `name` from the hub, or find it in the cache: configurations, and safetensors of components only."""
    from huggingface_hub import snapshot_download

    # safetensors of components only: the top folder often has a second copy of the whole model, as one file
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*/*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's errors have no common base class; all mean the same here
        cause = str(error).strip().splitlines() or [type(error).__name__]
        said = f"{name} is neither a folder here nor to be had from the hub: {cause[0]}"
        raise ModelError(said, model=name) from error


def stored_dtype(components: Sequence[ComponentFolder]) -> str:
    """Return the dtype of the largest component as stored. It is used for all, as they pass tensors to each other."""
    largest = max(components, key=lambda component: component.weight_bytes)
    if not largest.weight_files:
        return "float32"
    with safe_open(largest.weight_files[0], "pt") as file:
        stored = file.get_slice(next(iter(file.keys()))).get_dtype()
    return {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")
