"""What the user calls a model → a checked folder: a path, a hub id, or the demo model that ships."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from tightfit.checkpoint.folder import ModelFolder, check_folder
from tightfit.errors import ModelError

__all__ = ["find_model"]

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_model(name: str | None) -> ModelFolder:
    """The folder of `name`, checked; None is the demo model. ModelError with one line where there is none."""
    if name is None:
        return check_folder(Path(str(files("tightfit.demo") / "model")))
    path = Path(name).expanduser()
    if path.exists() or not _HUB_ID.fullmatch(name):
        return check_folder(path)
    return check_folder(_download(name))


def _download(name: str) -> Path:
    """The hub's `name`, fetched or from the cache: configurations, and the safetensors of its components only."""
    from huggingface_hub import snapshot_download

    # safetensors of components only: at the top there is often the whole model again, as one file
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*/*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's errors have no common base, and any of them means the same here
        cause = str(error).strip().splitlines() or [type(error).__name__]
        said = f"{name} is neither a folder here nor to be had from the hub: {cause[0]}"
        raise ModelError(said, model=name) from error
