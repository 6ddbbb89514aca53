"""Tensors and folders → the list of files to write, sharded and named as `save_pretrained` of their library does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import PreTrainedModel

from tightfit.checkpoint.checksums import RECORD_NAME
from tightfit.checkpoint.configurations import class_of
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder
from tightfit.checkpoint.headers import file_error, read_json
from tightfit.checkpoint.output_files import CopiedFile, OutputFile, StoredTensor, TensorFile, TensorSource, TextFile
from tightfit.checkpoint.tensors import read_locations
from tightfit.errors import ModelError, unknown_name

__all__ = [
    "choose_component", "config_file", "kept_files", "plan_component", "plan_folder", "plan_weights", "rounded_dtype",
]  # fmt: skip

_WEIGHTS = re.compile(  # files that hold weights, in any format, and their indexes
    r".*\.(safetensors|bin|pt|pth|ckpt|msgpack|h5|onnx|onnx_data|pb|gguf)|.*\.(safetensors|bin)\.index(\.[^.]+)?\.json"
)
_STEM = re.compile(r"(?P<stem>[^.]+)(\.safetensors\.index(\.[^.]+)?\.json|(\.[^.]+)?\.safetensors)")


def plan_folder(folder: ModelFolder, max_shard: int, dtype: torch.dtype | None = None) -> list[OutputFile]:
    """Return the files of a copy of `folder` whose weights are in shards of at most `max_shard` bytes.

    Everything is kept but weights that diffusers would not load. `dtype`, if not None, is what floating-point weights
    are rounded to, but those that their class keeps in float32; the copy has no variant then.
    """
    weights = [file for part in folder.components for file in plan_component(folder, part, max_shard, dtype)]
    return [*weights, *kept_files(folder.path, {file.name for file in weights})]


def plan_component(
    folder: ModelFolder,
    part: ComponentFolder,
    max_shard: int,
    dtype: torch.dtype | None = None,
    within: str | None = None,
) -> list[OutputFile]:
    """Return the weights of one component, and its configuration where `dtype` changes that.

    Their names begin with `within`, by default the component's own folder.
    """
    if not part.weight_files:
        return []
    prefix = f"{part.name}/" if within is None else within
    places = read_locations(part.weight_files, part.weight_index)
    kind = None if dtype is None else class_of(folder.path, part)
    tensors: dict[str, TensorSource] = {
        name: StoredTensor(place, rounded_dtype(kind, name, place.dtype, dtype))
        for name, place in sorted(places.items(), key=lambda item: (str(item[1].path), item[1].offset))
    }
    chosen = part.weight_index or part.weight_files[0]
    match = _STEM.fullmatch(chosen.name)
    stem = match["stem"] if match else "model"
    variant = None if dtype is not None else _variant_of(chosen.name)
    planned = plan_weights(f"{prefix}{stem}", tensors, max_shard, variant)
    return planned if dtype is None else [*planned, *config_file(chosen.parent, prefix, part, dtype)]


def _variant_of(name: str) -> str | None:
    match = re.fullmatch(r"[^.]+\.safetensors\.index\.([^.]+)\.json|[^.]+\.([^.]+)\.safetensors", name)
    return match[1] or match[2] if match else None


def plan_weights(
    stem: str, tensors: Mapping[str, TensorSource], max_shard: int, variant: str | None = None
) -> list[OutputFile]:
    """Return the files of one network: its shards and their index, or one file if that has at most `max_shard` bytes.

    `stem` is their name up to the first dot, with the folder. A tensor that is larger has a shard of its own.
    """
    middle = f".{variant}" if variant else ""
    pattern = f"{stem.rpartition('/')[2]}{middle}{{suffix}}.safetensors"
    folder = stem.rpartition("/")[0]
    split = split_state_dict_into_shards_factory(
        dict(tensors), get_storage_size=lambda tensor: tensor.size, filename_pattern=pattern, max_shard_size=max_shard
    )
    files: list[OutputFile] = [
        TensorFile(f"{folder}/{file}".lstrip("/"), {name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    ]
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files.append(TextFile(f"{stem}.safetensors.index{middle}.json", text))
    return files


def rounded_dtype(kind: Any, name: str, stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the weight `name` of a network of the class `kind` is written.

    It is `wanted` for floating-point weights, but `stored` for those that the class loads in float32 where `wanted` is
    asked for: rounding them would lose what loading cannot bring back.
    """
    if wanted is None or not stored.is_floating_point:
        return stored
    always = "_keep_in_fp32_modules_strict" if issubclass(kind, PreTrainedModel) else "_keep_in_fp32_modules"
    kept = _names(kind, always) | (_names(kind, "_keep_in_fp32_modules") if wanted == torch.float16 else set())
    return stored if kept & {*name.split(".")} else wanted


def _names(kind: Any, attribute: str) -> set[str]:
    names = getattr(kind, attribute, None) or ()
    return {names} if isinstance(names, str) else {*names}


def config_file(folder: Path, prefix: str, part: ComponentFolder, dtype: torch.dtype) -> Iterator[OutputFile]:
    """Yield the configuration of `part` in `folder` with `dtype` in it: transformers loads weights as that says.

    ModelError if the weights are stored quantized, which cannot be rounded.
    """
    config = read_json(folder / "config.json")
    if config.get("quantization_config") is not None:
        what = f"says that the weights are stored quantized: they cannot be rounded to {str(dtype)[6:]}"
        raise file_error(folder / "config.json", f"{what}; leave --dtype out", component=part.name)
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    if part.library == "transformers" and names:
        config |= dict.fromkeys(names, str(dtype)[6:])
        yield TextFile(f"{prefix}config.json", json.dumps(config, indent=2) + "\n")


def kept_files(root: Path, instead: set[str]) -> list[OutputFile]:
    """Return copies of all files in `root` but weights, hidden files, and those that there is something `instead` of.

    model_index.json is the last. Links are followed, folders that are reached twice are copied once.
    """
    found, seen = [], set[Path]()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := Path(folder).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(names):
            path = Path(folder, name)
            inside = path.relative_to(root).as_posix()
            if not (name.startswith(".") or _WEIGHTS.fullmatch(name) or inside in instead or inside == RECORD_NAME):
                found.append(CopiedFile.of(inside, path))
    return sorted(found, key=lambda file: file.name == "model_index.json")


def choose_component(folder: ModelFolder, name: str) -> ComponentFolder:
    """Return the component `name`. ModelError if there is none, or one without weights, with those that have them."""
    parts = {part.name: part for part in folder.components}
    with_weights = [part.name for part in folder.components if part.weight_files]
    if name not in parts:
        raise ModelError(unknown_name("component", name, with_weights), component=name, known=with_weights)
    if name not in with_weights:
        what = f"{name} of {folder.path.name} is a {parts[name].class_name} and has no weights"
        raise ModelError(f"{what}: those that have are {', '.join(with_weights)}", component=name, known=with_weights)
    return parts[name]
