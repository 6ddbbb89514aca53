"""A checked model folder → its pipeline without weights: configurations are read, weight files are not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tightfit.checkpoint.folder import ComponentFolder, ModelFolder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.measure.building import build_network

__all__ = ["build_folder"]


def build_folder(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """The pipeline of `folder`, the large tensors of its networks on "meta", in `dtype`.

    Raises ModelError where a configuration fits no class. A safety checker is left out: it looks at pictures.
    """
    networks = {part.name: _build(folder, part, dtype) for part in folder.components if part.weight_files}
    return load_pipeline(folder, dtype, networks)


def _build(folder: ModelFolder, part: ComponentFolder, dtype: torch.dtype) -> Any:
    if "safety" in part.name:
        return None
    kind = getattr(import_module(part.library), part.class_name)
    path = str(folder.path / part.name)
    if part.library == "transformers":
        config = kind.config_class.from_pretrained(path, local_files_only=True)
        return build_network(lambda: kind(config), dtype)
    config = kind.load_config(path, local_files_only=True)
    return build_network(lambda: kind.from_config(config), dtype)
