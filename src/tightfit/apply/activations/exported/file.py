"""An exported network: the conditions it runs under, and its file. It holds no weights and no code.

The file is a zip archive of `manifest.json`, `graph.json` and `constants.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import load, save

from tightfit.apply.activations.exported.graph import ExportedGraph
from tightfit.apply.activations.serialization import DAMAGED, open_bundle, part_of, write_bundle
from tightfit.errors import InputError, ModelError
from tightfit.schema.base import Record

__all__ = ["FORMAT", "ExportedFile", "Manifest", "TensorForm", "read_exported", "write_exported"]

FORMAT = 1
_MANIFEST, _GRAPH, _CONSTANTS = "manifest.json", "graph.json", "constants.safetensors"


class TensorForm(Record):
    """Dtype and shape of a tensor."""

    error: ClassVar[type[InputError]] = ModelError

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Manifest(Record):
    """What must be the same where an exported network runs as where it was exported."""

    error: ClassVar[type[InputError]] = ModelError

    format: int = FORMAT
    versions: dict[str, str]  # library → version
    class_name: str
    config: dict[str, Any]
    weights: dict[str, TensorForm]  # all parameters and buffers, by name
    parts: dict[str, str]  # module path → class, and a digest of its settings
    inputs: dict[str, TensorForm]  # tensor arguments of a call, by dotted name
    settings: dict[str, Any]  # all other arguments of a call: None, numbers, strings
    returns: Literal["tensor", "tuple"]


@dataclass(frozen=True)
class ExportedFile:
    """An exported network: conditions and inputs, operations, and the constant tensors of its code."""

    manifest: Manifest
    graph: ExportedGraph
    constants: dict[str, torch.Tensor]

    def save(self, path: str | Path) -> None:
        """Write it to the file `path`, completely or not at all. InputError on failure."""
        write_exported(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> ExportedFile:
        """Read the file at `path`; ModelError if it is no exported network of this format."""
        return read_exported(Path(path))


def write_exported(exported_file: ExportedFile, path: Path) -> None:
    """Write `traced` to `path`, completely or not at all. InputError on failure."""
    parts: dict[str, str | bytes] = {
        _MANIFEST: exported_file.manifest.to_json(indent=1),
        _GRAPH: exported_file.graph.to_json(),
        _CONSTANTS: save(exported_file.constants),
    }
    try:
        write_bundle(path, parts)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from None


def read_exported(path: Path) -> ExportedFile:
    """Read the file at `path`; ModelError if it is no exported network of this format."""
    try:
        with open_bundle(path) as archive:
            manifest = json.loads(part_of(archive, _MANIFEST))
            _check_format(path, manifest)
            graph = json.loads(part_of(archive, _GRAPH))
            constants = load(part_of(archive, _CONSTANTS))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from None
    except DAMAGED as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{path} is no exported denoiser, or not all of one: {said}", path=str(path)) from None
    try:
        return ExportedFile(Manifest.from_mapping(manifest), ExportedGraph.from_mapping(graph), constants)
    except ModelError as error:
        raise ModelError(f"{path} is no exported denoiser: {error}", **error.facts | {"path": str(path)}) from None


def _check_format(path: Path, manifest: object) -> None:
    found = manifest.get("format") if isinstance(manifest, Mapping) else None
    if found != FORMAT:
        raise ModelError(
            f"{path} has format {found!r:.20}, and this tightfit reads format {FORMAT}: export the denoiser again",
            path=str(path),
            format=repr(found),
        )
