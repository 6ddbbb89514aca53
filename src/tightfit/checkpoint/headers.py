"""JSON, shard indexes and headers of safetensors files → their contents, or one ModelError.

Neither torch nor diffusers is imported, and no weights are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as _short
from typing import Any

from tightfit.errors import ModelError
from tightfit.files import FileState

__all__ = [
    "DTYPES",
    "check_file",
    "file_error",
    "file_state",
    "listed",
    "mode_of",
    "names_in",
    "quoted",
    "read_header",
    "read_index",
    "read_json",
]

_LARGEST_JSON = 100_000_000  # bytes; also the longest header that safetensors allows
DTYPES = {  # bytes of an element
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_index(file: Path) -> dict[str, Path]:
    """Read a shard index: tensor → its shard in the same folder. ModelError if it is invalid or a shard is missing."""
    index = read_json(file)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata"), dict):
        raise file_error(file, "is no shard index: it needs the objects weight_map (tensor → shard) and metadata")
    for name in places.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise file_error(file, f"names the shard {_short(name)}: a shard is a .safetensors file beside its index")
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not mode_of(file.parent / name)]
    if missing:
        raise file_error(file, f"names {len(shards)} shards, of which {len(missing)} are missing: {listed(missing)}",
                     shards=len(shards), missing=missing)  # fmt: skip
    return {tensor: file.parent / name for tensor, name in places.items()}


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Read a safetensors header: the byte offset of the first tensor, and name → header entry of each tensor.

    The file is 8 bytes of header length, the header in JSON, the tensors. ModelError if the header is invalid, or the
    tensors do not fill the rest of the file without overlaps and gaps.
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
    _check_tensors(file, items)
    return 8 + length, items


def _end(file: Path, name: str, tensor: object) -> int:
    """End of a tensor, in bytes after the safetensors header."""
    match tensor:
        case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end < 2**63:
            return end
    raise file_error(file, f"is corrupt: its header has {_short(name)} as {_short(tensor)}, without sound data_offsets")


def _check_tensors(file: Path, items: Mapping[str, Any]) -> None:
    """ModelError if a tensor's bytes do not match its shape and dtype, or tensors overlap or leave gaps."""
    end, last = 0, "the header"
    for name, tensor in sorted(items.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = tensor["data_offsets"]
        _check_size(file, name, tensor, stop - begin)
        if begin != end:
            where = "within" if begin < end else f"{begin - end:,} bytes after"
            raise file_error(file, f"is corrupt: its header has {quoted(name)} begin {where} {last}", tensor=name)
        end, last = stop, quoted(name)


def _check_size(file: Path, name: str, tensor: Mapping[str, Any], size: int) -> None:
    match tensor:
        case {"dtype": str(code), "shape": list(shape)} if code in DTYPES and all(map(_is_count, shape)):
            if math.prod(shape) * DTYPES[code] == size:
                return
        case {"dtype": str(code)} if code not in DTYPES:
            what = f"has {quoted(name)} as {code[:80]!a}: tensors are read as {', '.join(DTYPES)}"
            raise file_error(file, what, tensor=name)
    stated = f"shape {_short(tensor.get('shape'))} of {_short(tensor.get('dtype'))}"
    raise file_error(file, f"is corrupt: its header has {quoted(name)} with {stated} in {size:,} bytes", tensor=name)


def _is_count(size: object) -> bool:
    return type(size) is int and size >= 0  # True is an int, too


def quoted(name: str) -> str:
    return ascii(name[:200])


def read_json(file: Path) -> dict[str, Any]:
    check_file(file)
    with _reading(file):
        data = file.read_bytes()
    return _parse(file, data)


def _parse(file: Path, data: bytes) -> dict[str, Any]:
    header = file.suffix == ".safetensors"
    what = "is corrupt: its header" if header else "is damaged: it"
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once if header else None)
    except (ValueError, RecursionError) as error:
        raise file_error(file, f"{what} is no JSON ({len(data):,} bytes): {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise file_error(file, f"{what} must be a JSON object, not {_short(value)}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of `pairs`. ValueError if one key is there twice: readers would disagree which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{quoted(twice)} is there twice")
    return found


def check_file(file: Path) -> None:
    """ModelError unless `file` is a file, or a link to one: not a folder, a pipe, or JSON larger than is ever read."""
    size = _size(file)
    if size > _LARGEST_JSON and file.suffix == ".json":
        raise file_error(file, f"has {size:,} bytes, and JSON is read up to {_LARGEST_JSON:,}", file_bytes=size)


def _size(file: Path) -> int:
    with _reading(file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise file_error(file, "must be a file, and is none")
    return status.st_size


def mode_of(path: Path) -> int:
    """Return `st_mode` of `path`, as in stat; 0 if it does not exist."""
    with _reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_mode
    return 0


def file_state(path: Path) -> FileState:
    with _reading(path):
        return FileState.of(path.stat())


def names_in(folder: Path) -> list[str]:
    with _reading(folder):
        return sorted(os.listdir(folder))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise file_error(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def file_error(path: Path, what: str, **facts: object) -> ModelError:
    """Return the ModelError for the problem `what` of a file or folder, named by the last two parts of its path."""
    return ModelError(f"{'/'.join(path.parts[-2:])} {what}", file=str(path), **facts)


def listed(names: list[str]) -> str:
    """Return the first three of `names` and the number of others, on one line."""
    shown = ascii(", ".join(names[:3]) or "nothing")[1:-1]  # a name may contain a line break
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
