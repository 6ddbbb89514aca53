"""`tightfit shard`: a model folder or single file → a folder with sharded weights and checksums."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable
from pathlib import Path

import torch

from tightfit.checkpoint.checksums import ChecksumRecord, verify_folder
from tightfit.checkpoint.folder import ModelFolder, check_folder, network_folder
from tightfit.checkpoint.folder_writer import WrittenFolder, write_folder
from tightfit.checkpoint.headers import mode_of, names_in
from tightfit.checkpoint.original_sharding import FilePlan, plan_original
from tightfit.checkpoint.output_files import OutputFile
from tightfit.checkpoint.sharding import choose_component, kept_files, plan_component, plan_folder
from tightfit.errors import InputError, ModelError, unknown_name
from tightfit.run.models import DTYPES, at_home
from tightfit.units import parse_bytes

__all__ = ["shard_model", "verify_model"]


def shard_model(
    source: Path,
    target: Path,
    max_shard_size: str = "2GB",
    dtype: str | None = None,
    component: str | None = None,
    config: Path | None = None,
    on_progress: Callable[[str, int, int], object] = lambda _what, _done, _total: None,
) -> WrittenFolder:
    """Write the model `source` as the new diffusers folder `target`, in safetensors of at most `max_shard_size` each.

    `source` is a diffusers folder, one network's, or a single safetensors file whose layout is that of the folder
    `config`, as diffusers writes or as it converts it. With `component`, `target` is the folder of that network alone.
    `dtype` is what weights are rounded to (default: as stored).

    Raises InputError for wrong options; ModelError, naming the file, for a `source` that cannot be used and a
    `target` that is there already; RunError, with the bytes, if the disk is full.
    """
    max_shard, rounded = parse_bytes(max_shard_size), _dtype_called(dtype)
    source, target = at_home(source), at_home(target)
    _check_target(source, target)
    if stat.S_ISDIR(mode_of(source)):
        plan = FilePlan(_files_of_folder(source, max_shard, rounded, component, config))
    else:
        plan = plan_original(source, None if config is None else at_home(config), component, max_shard, rounded)
    return dataclasses.replace(write_folder(target, plan.files, on_progress), notes=plan.notes)


def _dtype_called(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(unknown_name("dtype", name, DTYPES), dtype=name)
    found: torch.dtype = getattr(torch, name)
    return found


def _check_target(source: Path, target: Path) -> None:
    """InputError if `target` is `source` or within it."""
    if not mode_of(source):
        raise ModelError(
            f"{source} does not exist: a diffusers folder or a safetensors file is needed", path=str(source)
        )
    there, here = source.resolve(), target.resolve()
    if here == there or there in here.parents:
        where = "the source itself" if here == there else f"within the source {source}"
        raise InputError(f"{target} is {where}, which is never changed: name a new folder", target=str(target))


def _files_of_folder(
    source: Path, max_shard: int, dtype: torch.dtype | None, component: str | None, config: Path | None
) -> list[OutputFile]:
    if config is not None:
        raise InputError(
            f"--config {config} is for a single file, and {source} is a folder with its own", config=str(config)
        )
    folder = _checked(source)
    if folder.path == source and not folder.pipeline_class:  # one network
        if component is not None:
            (part,) = folder.components
            raise InputError(f"{source} is one network, {part.class_name}: leave --component {component} out")
        weights = plan_component(folder, folder.components[0], max_shard, dtype, within="")
        return [*weights, *kept_files(source, {file.name for file in weights})]
    if component is None:
        return plan_folder(folder, max_shard, dtype)
    part = choose_component(folder, component)
    weights = plan_component(folder, part, max_shard, dtype, within="")
    return [*weights, *kept_files(source / component, {file.name for file in weights})]


def _checked(source: Path) -> ModelFolder:
    """The contents of a pipeline's folder; of one network's folder, without a pipeline class."""
    if (
        stat.S_ISDIR(mode_of(source))
        and "model_index.json" not in (names := names_in(source))
        and "config.json" in names
    ):
        part = network_folder(source)
        return ModelFolder(source, "", (part,))
    return check_folder(source)


def verify_model(
    target: Path, on_progress: Callable[[str, int, int], object] = lambda _what, _done, _total: None
) -> WrittenFolder:
    """Compare the files of `target` with its checksums; return what is there.

    ModelError, naming the damaged files, if one is missing or another than was written.
    """
    target, done = at_home(target), 0
    total = ChecksumRecord.read(target).size if mode_of(target) else 0

    def on_bytes(name: str, count: int) -> None:
        nonlocal done
        done += count
        on_progress(f"verifying {name}", done, total)

    count = len(verify_folder(target, on_bytes).files)
    return WrittenFolder(target, count, total, count, total)
