"""Headers of safetensors files → the location of each weight of a network. No weights are read.

Only weights that a loader would use unchanged have a location. diffusers and transformers also rename weights saved by
older versions; their own functions are called for this. If they would compute a weight from others, or depend on
values, NotLazyLoadable is raised, and `from_pretrained` has to load the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as _short
from types import SimpleNamespace
from typing import NamedTuple

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from tightfit.checkpoint.headers import DTYPES, file_error, file_state, listed, quoted, read_header, read_index
from tightfit.errors import ModelError
from tightfit.files import FileState

__all__ = ["DTYPE_CODES", "NotLazyLoadable", "TensorLocation", "locate_weights", "read_locations"]

_OF_TORCH = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_DTYPES = dict(zip(DTYPES, _OF_TORCH, strict=True))
DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}  # as headers of safetensors name them


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor: `size` bytes of the file `path`, `offset` bytes from its start, in row-major order.

    `state` is the file's from before its header was read.
    """

    path: Path
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    state: FileState = field(compare=False)


class NotLazyLoadable(ModelError):
    """The files are valid, but some weight is not simply one of their tensors: `from_pretrained` can load it."""


class _HeaderEntry(NamedTuple):
    """A tensor and its name in its file."""

    name: str
    place: TensorLocation


def read_locations(files: Sequence[Path], index: Path | None = None) -> dict[str, TensorLocation]:
    """Return name → location of every tensor in the safetensors `files`: all the shards of `index`, if there is one.

    Raises ModelError, naming file and tensor, if a file does not match its header, a header is inconsistent, two files
    have the same tensor, or `index` does not match the files.
    """
    places: dict[str, TensorLocation] = {}
    for file in files:
        for name, place in _read_file(file).items():
            if name in places:
                raise file_error(file, f"has {quoted(name)}, and so has {places[name].path.name}", tensor=name)
            places[name] = place
    if index is not None:
        _check_index(index, places)
    return places


def _read_file(file: Path) -> dict[str, TensorLocation]:
    """Tensors of one file."""
    state = file_state(file)
    start, header = read_header(file)
    places = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        places[name] = TensorLocation(file, start + begin, end - begin, dtype, shape, state)
    return places


def _check_index(index: Path, places: Mapping[str, TensorLocation]) -> None:
    """ModelError if a tensor is not in the shard that `index` names for it."""
    shards = read_index(index)
    for name, place in places.items():
        if name not in shards:
            raise file_error(place.path, f"has {quoted(name)}, which {index.name} does not name", tensor=name)
        if shards[name].name != place.path.name:
            where = f"which {index.name} has in {shards[name].name}"
            raise file_error(place.path, f"has {quoted(name)}, {where}", tensor=name)
    lost = [name for name in shards if name not in places]
    if lost:
        what = f"has {quoted(lost[0])} in {shards[lost[0]].name}, where it is not"
        raise file_error(index, f"{what} ({len(lost)} of {len(shards)} tensors are lost)", tensors=lost)


def locate_weights(network: nn.Module, places: Mapping[str, TensorLocation], what: str) -> dict[str, TensorLocation]:
    """Return name in the state dict of `network` → location of that parameter or persistent buffer.

    `network` may be built without weights; `what` names it in errors. All names of a shared tensor have one location.
    A floating-point tensor may be stored in another floating-point dtype, which the caller converts; others must match.

    Raises ModelError, naming file and tensor, if weights are missing, of another shape or kind, or unexpected (unless
    the class of `network` ignores them); NotLazyLoadable if a loader would compute one.
    """
    _refuse_quantized(network, what)
    stored = _stored_weights(network, places, what)
    weights = {name: value for name, value in network.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    sources = _share(weights, stored, what)
    _check_names(network, weights.keys() - sources.keys(), stored, what)
    for name, source in sources.items():
        _check_kind(weights[name], source, what)
    return {name: sources[name].place for name in weights}


def _refuse_quantized(network: nn.Module, what: str) -> None:
    method = getattr(getattr(network, "config", None), "quantization_config", None)
    if method is not None:
        raise NotLazyLoadable(f"the weights of {what} are stored quantized: {_short(method)}", what=what)


def _stored_weights(network: nn.Module, places: Mapping[str, TensorLocation], what: str) -> dict[str, _HeaderEntry]:
    """Name in the state dict of `network` → its stored tensor, also for names that `network` does not have."""
    stored = {name: _HeaderEntry(name, place) for name, place in sorted(places.items())}
    if isinstance(network, PreTrainedModel):
        return _rename_as_transformers(network, stored.values(), what)
    if isinstance(network, ModelMixin):
        network._fix_state_dict_keys_on_load(stored)  # renames outdated keys
    return stored


def _rename_as_transformers(
    network: PreTrainedModel, stored: Iterable[_HeaderEntry], what: str
) -> dict[str, _HeaderEntry]:
    """Rename as `convert_and_load_state_dict_in_model` of transformers, which also goes through sorted names."""
    conversions = get_model_conversion_mapping(network)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    known, prefix = network.state_dict(), network.base_model_prefix
    renamed: dict[str, _HeaderEntry] = {}
    for source in stored:
        name, converter = rename_source_key(source.name, renamings, converters, prefix, known)
        if name not in known and source.name in known:
            name, converter = rename_source_key(source.name, [], [], prefix, known)
        if converter is not None and name in known:
            how = f"transformers computes from {quoted(source.name)} in {source.place.path.name}"
            raise NotLazyLoadable(f"{what} has {quoted(name)}, which {how}", tensor=source.name)
        if name in known and name in renamed:
            both = f"{quoted(renamed[name].name)} and {quoted(source.name)}"
            raise file_error(source.place.path, f"has {both}, which are one weight of {what}", tensor=source.name)
        renamed[name] = source
    return renamed


def _share(
    weights: Mapping[str, torch.Tensor], stored: Mapping[str, _HeaderEntry], what: str
) -> dict[str, _HeaderEntry]:
    """Name of a weight → the tensor stored under this or another name of it; names without one are left out."""
    names_of: dict[int, list[str]] = {}
    for name, weight in weights.items():
        names_of.setdefault(id(weight), []).append(name)
    sources: dict[str, _HeaderEntry] = {}
    for names in names_of.values():
        there = [name for name in names if name in stored]
        if len(there) > 1:  # transformers ties them if their values are equal
            raise NotLazyLoadable(f"{what} has one tensor as {listed(there)}, which are stored apart", tensors=there)
        if there:
            sources |= dict.fromkeys(names, stored[there[0]])
    return sources


def _check_names(network: nn.Module, missing: Set[str], stored: Mapping[str, _HeaderEntry], what: str) -> None:
    """ModelError if `missing` weights are needed, or `stored` ones are not; NotLazyLoadable if others are missing."""
    known = network.state_dict().keys()
    needed, unknown = _unless_ignored(network, missing, stored.keys() - known)
    if needed:
        files = sorted({"/".join(source.place.path.parts[-2:]) for source in stored.values()})
        said = f"{what} lacks {len(needed)} of {len(known)} weights: {listed(needed)}"
        raise ModelError(f"{said}; its files are {listed(files)}", what=what, missing=needed)
    if unknown:
        first = stored[unknown[0]]
        said = f"has {quoted(first.name)}, which is no weight of {what}"
        raise file_error(first.place.path, f"{said} ({len(unknown)} such tensors)", tensors=unknown)
    if missing:
        made = f"{type(network).__name__} makes up when it is loaded"
        raise NotLazyLoadable(f"{what} lacks {listed(sorted(missing))}, which {made}", what=what)


def _unless_ignored(network: nn.Module, missing: Set[str], unknown: Set[str]) -> tuple[list[str], list[str]]:
    """`missing` and `unknown` names, sorted, without those that the class of `network` ignores when loading."""
    if isinstance(network, PreTrainedModel):
        left = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unknown))
        network._adjust_missing_and_unexpected_keys(left)
        return sorted(left.missing_keys), sorted(left.unexpected_keys)
    patterns = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    return sorted(missing), sorted(name for name in unknown if not any(re.search(part, name) for part in patterns))


def _check_kind(weight: torch.Tensor, source: _HeaderEntry, what: str) -> None:
    """ModelError if the stored tensor has not the shape of `weight`, or a dtype that cannot be rounded to its dtype."""
    place = source.place
    if place.shape != tuple(weight.shape):
        stated = f"as {list(place.shape)}, and {what} needs {list(weight.shape)}"
    elif place.dtype != weight.dtype and not (place.dtype.is_floating_point and weight.dtype.is_floating_point):
        stated = f"in {place.dtype}, and {what} needs {weight.dtype}"
    else:
        return
    raise file_error(place.path, f"has {quoted(source.name)} {stated}", tensor=source.name)
