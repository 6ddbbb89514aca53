"""A diffusers pipeline folder, looked through before anything is loaded: what is in it, or one clear error.

Read are names, JSON, and the header of each safetensors file, which says how long the file must be. No weight is
read, nothing of the folder is run, and neither torch nor diffusers is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as _short
from typing import Any

from tightfit.errors import ModelError, unknown_name

__all__ = ["ComponentFolder", "ModelFolder", "check_folder", "file_error", "listed", "read_header", "read_index"]

_LARGEST_JSON = 100_000_000  # bytes; safetensors allows no longer header either
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}  # what each library loads
_WEIGHTLESS = re.compile(r".*(Tokenizer(Fast)?|Scheduler|Processor(Fast)?|FeatureExtractor|Guidance)")


@dataclasses.dataclass(frozen=True)
class ComponentFolder:
    """One component. `weight_bytes` counts its tensors as stored, `weight_index` names their shards, if it has any."""

    name: str
    library: str
    class_name: str
    weight_files: tuple[Path, ...] = ()
    weight_bytes: int = 0
    weight_index: Path | None = None


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A pipeline folder that `check_folder` has passed. `variant` is None unless some weights exist only as one."""

    path: Path
    pipeline_class: str
    components: tuple[ComponentFolder, ...]
    variant: str | None = None


def check_folder(path: Path) -> ModelFolder:
    """What the diffusers folder `path` holds; the bytes of its weights are taken from their headers.

    Raises ModelError, naming the file and the numbers, where the folder is no pipeline, is incomplete, truncated or
    corrupt, has no safetensors, or asks for python code of its own.
    """
    path = Path(path)
    index_file = _find_index(path)
    index = _read_config(index_file, named=True)
    parts = [_read_component(path, *entry) for entry in _entries(index_file, index)]
    weights = {part.name: _weight_sets(path / part.name, part) for part in parts}
    variant = _choose_variant(path, weights)
    components = tuple(_add_weights(part, weights[part.name], variant) for part in parts)
    return ModelFolder(path, index["_class_name"], components, variant)


def _find_index(path: Path) -> Path:
    if not _mode(path):
        what = "does not exist"
    elif not stat.S_ISDIR(_mode(path)):
        what = "is a file, not a folder"
    elif "model_index.json" not in (names := _names(path)):
        what = f"is no model: it has no model_index.json, but {listed(names)}"
    else:
        return path / "model_index.json"
    raise ModelError(f"{path} {what}; a folder as pipe.save_pretrained(folder) writes it is needed", path=str(path))


def _read_config(file: Path, named: bool) -> dict[str, Any]:
    """A JSON object that points to no code; where it must be `named`, with the class to load as `_class_name`."""
    config = _read_object(file)
    _refuse_code(file, config)
    name = config.get("_class_name")
    if named and not (isinstance(name, str) and name.isidentifier()):
        state = "has no _class_name" if name is None else f"has {_short(name)} as _class_name"
        raise file_error(file, f"{state}: it must name the class to load")
    return config


def _refuse_code(file: Path, config: dict[str, Any]) -> None:
    """ModelError where a config names python files of its own folder: a list as `_class_name`, or any `auto_map`."""
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
    """(component, library, class) of all components in the index that are not null; the rest are options."""
    found = []
    for name, entry in index.items():
        match entry:
            case [None, _]:
                continue
            case [str(library), str(class_name)] if name.isidentifier() and class_name.isidentifier():
                _check_library(file, name, library)
                found.append((name, library, class_name))
            case list() | str() | dict() if name.isidentifier() and stat.S_ISDIR(_mode(file.parent / name)):
                raise file_error(file, f"has {name} as {_short(entry)}: it must be [library, class] or [null, null]")
    if not found:
        raise file_error(file, "names 0 components: a pipeline has at least one, such as a unet or a transformer")
    return found


def _check_library(file: Path, name: str, library: str) -> None:
    """Classes come from diffusers, one of its pipeline packages ("stable_diffusion"), or transformers."""
    foreign = library not in _STEMS and library not in _pipeline_packages()
    if foreign or _mode(file.parent / name / f"{library}.py"):
        why = unknown_name("library", library[:60], _STEMS) if foreign else f"{name}/{library}.py"
        raise file_error(file, f"takes {name} from python code of its own ({why}): code in a model folder is never run",
                     component=name, library=library)  # fmt: skip


@functools.cache
def _pipeline_packages() -> frozenset[str]:
    """The packages in diffusers.pipelines, found without importing diffusers."""
    spec = importlib.util.find_spec("diffusers")
    places = spec.submodule_search_locations if spec else None
    return frozenset(f.parent.name for place in places or () for f in Path(place).glob("pipelines/**/__init__.py"))


def _read_component(root: Path, name: str, library: str, class_name: str) -> ComponentFolder:
    folder = root / name
    if not stat.S_ISDIR(_mode(folder)):
        raise file_error(folder, f"is missing: model_index.json has {name} as {class_name}", component=name)
    names = _names(folder)
    configs = [file for file in names if file.endswith("config.json") and file != "generation_config.json"]
    if not configs and not (names and "Tokenizer" in class_name):
        raise file_error(folder, f"has no config.json or other *_config.json for {class_name}, but {listed(names)}",
                     component=name, files=len(names))  # fmt: skip
    for config in configs:
        _read_config(folder / config, named=config == "config.json" and library == "diffusers")
    return ComponentFolder(name, library, class_name)


def _weight_sets(folder: Path, part: ComponentFolder) -> dict[str | None, Path]:
    """variant → its safetensors file or shard index, the one its library would take. Empty: it needs no weights."""
    names = _names(folder)
    if "config.json" not in names or _WEIGHTLESS.fullmatch(part.class_name):
        return {}
    stem = _STEMS.get(part.library, "(?:diffusion_pytorch_)?model")
    file = rf"{stem}(?:\.((?:(?!-\d{{5}}-of-)[^.])+))?\.safetensors"
    index = rf"{stem}\.safetensors\.index(?:\.([^.]+))?\.json"
    found: dict[str | None, Path] = {}
    for pattern in (index, file) if part.library == "transformers" else (file, index):
        found |= {match[1]: folder / name for name in names if (match := re.fullmatch(pattern, name))}
    if not found:
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
    """None where all weights are there without a variant; else one variant that fills all the gaps."""
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


def read_index(file: Path) -> dict[str, Path]:
    """tensor → its shard, of an index beside its shards; ModelError where it is no index or a shard is not there."""
    index = _read_object(file)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata"), dict):
        raise file_error(file, "is no shard index: it needs the objects weight_map (tensor → shard) and metadata")
    for name in places.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise file_error(file, f"names the shard {_short(name)}: a shard is a .safetensors file beside its index")
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not _mode(file.parent / name)]
    if missing:
        raise file_error(file, f"names {len(shards)} shards, of which {len(missing)} are missing: {listed(missing)}",
                     shards=len(shards), missing=missing)  # fmt: skip
    return {tensor: file.parent / name for tensor, name in places.items()}


def _tensor_bytes(file: Path) -> int:
    """Bytes of all tensors in a safetensors file."""
    return max((tensor["data_offsets"][1] for tensor in read_header(file)[1].values()), default=0)


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where in a safetensors file its tensors begin, in bytes, and name → what the header says of that tensor.

    The file is 8 bytes of header length, the header in JSON, the tensors. Checked is its length, no more: ModelError
    where the header is none, or the last tensor does not end with the file.
    """
    size = _size(file)
    with _reading(file), file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        header = stream.read(length) if length <= min(_LARGEST_JSON, size - 8) else None
    if start == b"version " and size < 1024:
        raise file_error(file, f"is a Git LFS pointer of {size:,} bytes, not the weights: fetch them with git lfs pull")
    items = {} if header is None else _parse(file, header)
    items.pop("__metadata__", None)
    tensors = max((_end(file, name, tensor) for name, tensor in items.items()), default=0)
    promised = 8 + length + tensors
    if promised != size or header is None:
        state = "truncated" if promised > size else "corrupt"
        raise file_error(file, f"is {state}: its header promises {promised:,} bytes, the file has {size:,}",
                     promised_bytes=promised, file_bytes=size)  # fmt: skip
    return 8 + length, items


def _end(file: Path, name: str, tensor: object) -> int:
    """Where a tensor of a safetensors header ends, in bytes after the header."""
    match tensor:
        case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end < 2**63:
            return end
    raise file_error(file, f"is corrupt: its header has {_short(name)} as {_short(tensor)}, without sound data_offsets")


def _read_object(file: Path) -> dict[str, Any]:
    if (size := _size(file)) > _LARGEST_JSON:
        raise file_error(file, f"has {size:,} bytes, and JSON is read up to {_LARGEST_JSON:,}", file_bytes=size)
    with _reading(file):
        data = file.read_bytes()
    return _parse(file, data)


def _parse(file: Path, data: bytes) -> dict[str, Any]:
    what = "is corrupt: its header" if file.suffix == ".safetensors" else "is damaged: it"
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise file_error(file, f"{what} is no JSON ({len(data):,} bytes): {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise file_error(file, f"{what} must be a JSON object, not {_short(value)}")
    return value


def _size(file: Path) -> int:
    with _reading(file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise file_error(file, "must be a file, and is none")
    return status.st_size


def _mode(path: Path) -> int:
    """What kind of file it is, as in stat; 0 where there is none."""
    with _reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_mode
    return 0


def _names(folder: Path) -> list[str]:
    with _reading(folder):
        return sorted(os.listdir(folder))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise file_error(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def file_error(path: Path, what: str, **facts: object) -> ModelError:
    """`what` is wrong with the file or folder; it is named by the last two parts of its path."""
    return ModelError(f"{'/'.join(path.parts[-2:])} {what}", file=str(path), **facts)


def listed(names: list[str]) -> str:
    """The first three of `names` and how many more there are, on one line."""
    shown = ascii(", ".join(names[:3]) or "nothing")[1:-1]  # a name may hold a line break
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
