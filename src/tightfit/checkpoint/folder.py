"""A diffusers pipeline folder → its contents, checked before anything is loaded, or one ModelError.

Only names, JSON, and the header of each safetensors file, which determines the file's length, are read. No weights are
read and no code of the folder is run. Only `network_folder` imports diffusers, nothing here torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
import stat
from pathlib import Path
from reprlib import repr as _short
from typing import Any

from tightfit.checkpoint.headers import (
    check_file,
    file_error,
    listed,
    mode_of,
    names_in,
    read_header,
    read_index,
    read_json,
)
from tightfit.errors import ModelError, unknown_name

__all__ = ["ComponentFolder", "ModelFolder", "check_folder", "network_folder"]

_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}  # of each library's weight files
_READ = (".json", ".txt", ".model", ".jinja", ".safetensors")  # endings of the files that libraries may open
_WEIGHTLESS = re.compile(r".*(Tokenizer(Fast)?|Scheduler|Processor(Fast)?|FeatureExtractor|Guidance)")


@dataclasses.dataclass(frozen=True)
class ComponentFolder:
    """One component. `weight_bytes` are those of its tensors as stored; `weight_index` lists its shards, if any."""

    name: str
    library: str
    class_name: str
    weight_files: tuple[Path, ...] = ()
    weight_bytes: int = 0
    weight_index: Path | None = None


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A pipeline folder checked by `check_folder`. `variant` is None unless some weights exist only as a variant."""

    path: Path
    pipeline_class: str
    components: tuple[ComponentFolder, ...]
    variant: str | None = None


def check_folder(path: Path, *, weights_needed: bool = True) -> ModelFolder:
    """Check the diffusers folder `path` and return its contents; the bytes of its weights are from their headers.

    If no weights are needed, components may have none: the folder is only the layout of a model.

    Raises ModelError, naming the file and the numbers, if the folder is no pipeline, is incomplete, truncated or
    corrupt, has no safetensors, or needs Python code of its own.
    """
    path = Path(path)
    index_file = _find_index(path)
    index = _read_config(index_file, named=True)
    parts = [_read_component(path, *entry) for entry in _entries(index_file, index)]
    weights = {part.name: _weight_sets(path / part.name, part, weights_needed) for part in parts}
    variant = _choose_variant(path, weights)
    components = tuple(_add_weights(part, weights[part.name], variant) for part in parts)
    return ModelFolder(path, index["_class_name"], components, variant)


def _find_index(path: Path) -> Path:
    if not mode_of(path):
        what = "does not exist"
    elif not stat.S_ISDIR(mode_of(path)):
        what = "is a file, not a folder"
    elif "model_index.json" not in (names := names_in(path)):
        what = f"is no model: it has no model_index.json, but {listed(names)}"
    else:
        return path / "model_index.json"
    raise ModelError(f"{path} {what}; a folder as pipe.save_pretrained(folder) writes it is needed", path=str(path))


def _read_config(file: Path, named: bool) -> dict[str, Any]:
    """Read a JSON object that refers to no code; if `named`, it must have the class to load as `_class_name`."""
    config = read_json(file)
    _refuse_code(file, config)
    name = config.get("_class_name")
    if named and not (isinstance(name, str) and name.isidentifier()):
        state = "has no _class_name" if name is None else f"has {_short(name)} as _class_name"
        raise file_error(file, f"{state}: it must name the class to load")
    return config


def _refuse_code(file: Path, config: dict[str, Any]) -> None:
    """ModelError if a config names Python files in its folder: by a list as `_class_name`, or any `auto_map`."""
    code = config["_class_name"] if isinstance(config.get("_class_name"), list) else None
    waiting: list[Any] = [config]
    while waiting and code is None:
        value = waiting.pop()
        if isinstance(value, dict):
            code = value.get("auto_map")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if code is not None:
        raise file_error(file, f"names python code ({_short(code)}): code in a model folder is never run")


def _entries(file: Path, index: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(component, library, class) of all components in the index that are not null; other entries are options."""
    found = []
    for name, entry in index.items():
        match entry:
            case [None, _]:
                continue
            case [str(library), str(class_name)] if name.isidentifier() and class_name.isidentifier():
                _check_library(file, name, library)
                found.append((name, library, class_name))
            case list() | str() | dict() if name.isidentifier() and stat.S_ISDIR(mode_of(file.parent / name)):
                raise file_error(file, f"has {name} as {_short(entry)}: it must be [library, class] or [null, null]")
    if not found:
        raise file_error(file, "names 0 components: a pipeline has at least one, such as a unet or a transformer")
    return found


def _check_library(file: Path, name: str, library: str) -> None:
    """ModelError unless `library` is diffusers, one of its pipeline packages ("stable_diffusion"), or transformers."""
    foreign = library not in _STEMS and library not in _pipeline_packages()
    if foreign or mode_of(file.parent / name / f"{library}.py"):
        why = unknown_name("library", library[:60], _STEMS) if foreign else f"{name}/{library}.py"
        raise file_error(file, f"takes {name} from python code of its own ({why}): code in a model folder is never run",
                     component=name, library=library)  # fmt: skip


@functools.cache
def _pipeline_packages() -> frozenset[str]:
    """Packages in diffusers.pipelines, found without importing diffusers."""
    spec = importlib.util.find_spec("diffusers")
    places = spec.submodule_search_locations if spec else None
    return frozenset(f.parent.name for place in places or () for f in Path(place).glob("pipelines/**/__init__.py"))


def _read_component(root: Path, name: str, library: str, class_name: str) -> ComponentFolder:
    folder = root / name
    if not stat.S_ISDIR(mode_of(folder)):
        raise file_error(folder, f"is missing: model_index.json has {name} as {class_name}", component=name)
    names = names_in(folder)
    configs = [file for file in names if file.endswith("config.json") and file != "generation_config.json"]
    if not configs and not (names and "Tokenizer" in class_name):
        raise file_error(folder, f"has no config.json or other *_config.json for {class_name}, but {listed(names)}",
                     component=name, files=len(names))  # fmt: skip
    for file in names:
        if file.endswith(_READ):
            check_file(folder / file)
    for config in configs:
        _read_config(folder / config, named=config == "config.json" and library == "diffusers")
    return ComponentFolder(name, library, class_name)


def _weight_sets(folder: Path, part: ComponentFolder, needed: bool = True) -> dict[str | None, Path]:
    """variant → the safetensors file or shard index that the library would load. Empty: it needs no weights."""
    names = names_in(folder)
    if "config.json" not in names or _WEIGHTLESS.fullmatch(part.class_name):
        return {}
    stem = _STEMS.get(part.library, "(?:diffusion_pytorch_)?model")
    file = rf"{stem}(?:\.((?:(?!-\d{{5}}-of-)[^.])+))?\.safetensors"
    index = rf"{stem}\.safetensors\.index(?:\.([^.]+))?\.json"
    found: dict[str | None, Path] = {}
    for pattern in (index, file) if part.library == "transformers" else (file, index):
        found |= {match[1]: folder / name for name in names if (match := re.fullmatch(pattern, name))}
    if not found and needed:
        raise _no_weights(folder, part, names)
    return found


def _no_weights(folder: Path, part: ComponentFolder, names: list[str]) -> ModelError:
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        what = f"is a pickle, which can run code when it is read, and {part.name} has 0 safetensors files"
        how = "convert the model with pipe.save_pretrained(folder, safe_serialization=True)"
        return file_error(folder / pickles[0], f"{what}: only safetensors are loaded; {how}", pickles=len(pickles))
    stem = _STEMS.get(part.library, "model")
    how = f"it needs {stem}.safetensors, or shards and their .index.json"
    what = f"has no weights for {part.class_name}, but {listed(names)}: {how}"
    return file_error(folder, what, component=part.name, files=len(names))


def _choose_variant(root: Path, weights: dict[str, dict[str | None, Path]]) -> str | None:
    """None if all weights exist without a variant; else a variant that all other components have."""
    bound = {name: {key for key in sets if key} for name, sets in weights.items() if sets and None not in sets}
    if not bound:
        return None
    common = set.intersection(*bound.values())
    if not common:
        each = ", ".join(f"{name} is only there as {'/'.join(sorted(keys))}" for name, keys in bound.items())
        raise ModelError(f"{root} has no variant that all of its components have: {each}", path=str(root))
    return min(common)


def _add_weights(part: ComponentFolder, sets: dict[str | None, Path], variant: str | None) -> ComponentFolder:
    if not sets:
        return part
    chosen = sets.get(variant) or sets[None]
    index = None if chosen.suffix == ".safetensors" else chosen
    files = (chosen,) if index is None else tuple(sorted(set(read_index(index).values())))
    size = sum(map(_tensor_bytes, files))
    return dataclasses.replace(part, weight_files=files, weight_bytes=size, weight_index=index)


def _tensor_bytes(file: Path) -> int:
    """Bytes of all tensors in a safetensors file."""
    return max((tensor["data_offsets"][1] for tensor in read_header(file)[1].values()), default=0)


def network_folder(path: Path, *, weights_needed: bool = True) -> ComponentFolder:
    """Check a single network, as `model.save_pretrained(path)` of diffusers writes it; return it as "model".

    If no weights are needed, its configuration is enough. Raises ModelError as `check_folder` does.
    """
    path = Path(path)
    if not stat.S_ISDIR(mode_of(path)) or "config.json" not in names_in(path):
        raise ModelError(f"{path} holds neither a pipeline nor a network: no model_index.json, no config.json",
                         path=str(path))  # fmt: skip
    config = _read_config(path / "config.json", named=True)
    part = ComponentFolder("model", "diffusers", config["_class_name"])
    if not hasattr(importlib.import_module("diffusers"), part.class_name):
        raise file_error(path / "config.json", unknown_name("network of diffusers", part.class_name, ()))
    sets = _weight_sets(path, part, weights_needed)
    return _add_weights(part, sets, _choose_variant(path, {part.name: sets}))
