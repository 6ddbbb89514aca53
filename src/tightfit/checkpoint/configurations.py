"""Configurations of a checked folder → the classes they are for, or one ModelError with the file and the field.

Types are those of a constructor's own annotations and defaults. transformers checks the types of its configurations
itself. No number may be so large that the folder's files cannot bear it out: some classes make lists as long.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from reprlib import repr as _short
from typing import Any

import numpy as np

from tightfit.checkpoint.folder import ComponentFolder, ModelFolder
from tightfit.checkpoint.headers import file_error, listed, mode_of, names_in, read_json
from tightfit.errors import unknown_name

__all__ = ["LARGEST", "check_configuration", "check_configurations", "check_sizes", "class_of", "first_line", "making"]

LARGEST = 2**24  # of integers in a network's configuration, unless its files hold as many elements
_LARGEST_WITHOUT_WEIGHTS = 2**21  # schedulers make tables of as many numbers, tokenizers pad to as many tokens
_DIVISORS = {"scaling_factor"}
_UNLIMITED = 2**63  # a tokenizer's `model_max_length` from here on says that there is none


def check_configurations(folder: ModelFolder) -> None:
    """Check all that the components of `folder` are made from, but weights."""
    index = folder.path / "model_index.json"
    pipeline = class_of(folder.path, ComponentFolder("", "diffusers", folder.pipeline_class))
    names = {part.name for part in folder.components}
    _check_types(index, pipeline, {name: value for name, value in read_json(index).items() if name not in names})
    for part in folder.components:
        if "safety" not in part.name:  # a safety checker is never loaded
            _check_component(folder.path, part)


def _check_component(root: Path, part: ComponentFolder) -> None:
    kind, here = class_of(root, part), root / part.name
    if part.library == "transformers":
        if part.weight_files:
            check_sizes(here / "config.json", read_json(here / "config.json"), _most_of(part))
        return _check_tokenizer(here, kind)
    file = here / str(getattr(kind, "config_name", None) or "config.json")
    if mode_of(file):
        check_configuration(file, kind, part)
    return None


def check_configuration(file: Path, kind: type, part: ComponentFolder) -> None:
    """Check the `file` from which the class `kind` of diffusers makes `part`."""
    config = read_json(file)
    _check_types(file, kind, config)
    check_sizes(file, config, _most_of(part))


def class_of(root: Path, part: ComponentFolder) -> Any:
    """Return the class of a component of the pipeline in `root`, without a name of the pipeline itself.

    ModelError where the library has no such class.
    """
    own = part.library in ("diffusers", "transformers")
    library = import_module(part.library if own else f"diffusers.pipelines.{part.library}")
    kind = getattr(library, part.class_name, None)
    if not isinstance(kind, type):
        known = [name for name in dir(library) if name[:1].isupper() and (part.name or "Pipeline" in name)]
        what = f"class of {part.library} for {part.name}" if part.name else "pipeline class"
        said = f"has an {unknown_name(what, part.class_name[:100], known)}"
        raise file_error(root / "model_index.json", said, component=part.name, class_name=part.class_name)
    return kind


@contextlib.contextmanager
def making(file: Path, class_name: str) -> Iterator[None]:
    """Raise what a library says against the configuration in `file` as a ModelError that names the file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        what = f"makes no {class_name}: {first_line(error)}"
        raise file_error(file, what, cause=type(error).__name__) from error


def first_line(error: BaseException) -> str:
    """Message of `error` on one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    if not said or isinstance(error, LookupError | ArithmeticError | AssertionError):  # a KeyError's is only the key
        said = f"{type(error).__name__} {said}".strip()
    return textwrap.shorten(said, 300, placeholder=" …")


# types


def _check_types(file: Path, kind: type, config: Mapping[str, Any]) -> None:
    """ModelError if a value has not the type of the parameter of that name in the constructor of `kind`."""
    try:
        hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
        parameters = inspect.signature(kind).parameters
    except (NameError, TypeError, ValueError):  # annotations that refer to what is not there
        return
    for name, value in config.items():
        if name not in hints or name not in parameters:
            continue
        default = parameters[name].default
        if not _fits(value, hints[name]) and type(value) is not type(default):
            wanted = f"{kind.__name__} takes {_named(hints[name])}"
            more = "" if default is inspect.Parameter.empty else f", by default {_short(default)}"
            raise file_error(file, f"has {_short(value)} as {name}: {wanted}{more}", field=name)
        if type(value) is int and type(default) is int and value < 0 < default:
            raise file_error(file, f"has {value} as {name}, which must be positive: by default {default}", field=name)
        if isinstance(value, float) and math.isnan(value):
            raise file_error(file, f"has NaN as {name}, which is no number", field=name)
        if name in _DIVISORS and value == 0:
            raise file_error(file, f"has 0 as {name}, by which latents are divided", field=name)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON can be what `hint` says. Hints are not always true, so this is generous.

    None passes for everything, numbers pass for bools, and the length of a list and how deep it is are not checked.
    """
    origin, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is typing.Literal:
        return any(_fits(value, type(each)) for each in inside)
    if origin in (bool, int, float):
        return (number and not (origin is int and isinstance(value, float))) or (origin is bool and type(value) is bool)
    if origin in (list, tuple, Sequence, np.ndarray):
        return isinstance(value, list) and all(_fits_inside(item, inside) for item in value)
    return origin not in (str, dict, type(None)) or isinstance(value, origin)


def _fits_inside(item: object, inside: tuple[Any, ...]) -> bool:
    kinds = [each for each in inside if each is not Ellipsis]
    items = item if isinstance(item, list) else [item]
    return (
        not kinds
        or any(_fits(item, each) for each in kinds)
        or (items is item and all(_fits_inside(each, inside) for each in items))
    )


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


# sizes


def _most_of(part: ComponentFolder) -> int:
    """The largest number that may be in the configuration of `part`."""
    return max(LARGEST, part.weight_bytes) if part.weight_files else _LARGEST_WITHOUT_WEIGHTS


def check_sizes(file: Path, config: Any, most: int, field: str = "") -> None:
    """ModelError if an integer anywhere in `config` is above `most`: lists and tables of as many items may be made.

    The base of rotary embeddings is none that counts anything: real models have up to a billion.
    """
    if isinstance(config, dict | list):
        for name, value in config.items() if isinstance(config, dict) else enumerate(config):
            check_sizes(file, value, most, f"{field}.{name}" if field else str(name))
    elif isinstance(config, int) and abs(config) > most and "theta" not in field:
        what = f"has {_short(config)} as {field[:200]}, more than its files can mean: {most:,} at the most"
        raise file_error(file, what, field=field, most=most)


# tokenizers


def _check_tokenizer(folder: Path, kind: Any) -> None:
    """ModelError if the tokenizer in `folder`, or that of the processor `kind`, has no words or absurd lengths."""
    file = folder / "tokenizer_config.json"
    config = read_json(file) if mode_of(file) else {}
    if "ProcessorMixin" in {each.__name__ for each in kind.__mro__}:
        kind = getattr(import_module("transformers"), str(config.get("tokenizer_class")), None)
    if not hasattr(kind, "vocab_files_names"):
        return
    longest = config.get("model_max_length", _UNLIMITED)
    if type(longest) not in (int, float) or not longest > 0 or longest % 1:
        raise file_error(file, f"has {_short(longest)} as model_max_length: it must be a number of tokens",
                         field="model_max_length")  # fmt: skip
    known = config if longest < _UNLIMITED else {**config, "model_max_length": 0}
    check_sizes(file, known, _LARGEST_WITHOUT_WEIGHTS)
    _check_vocabulary(folder, kind)


def _check_vocabulary(folder: Path, kind: Any) -> None:
    """ModelError if the files of a tokenizer's words are missing: transformers makes up an empty vocabulary then."""
    wanted: dict[str, str] = dict(getattr(kind, "vocab_files_names", None) or {})
    if not wanted:
        return
    whole, names = wanted.pop("tokenizer_file", "tokenizer.json"), names_in(folder)
    there = whole in names or any(name.endswith(".model") for name in names)  # sentencepiece's hold everything
    missing = [name for name in wanted.values() if name not in names] if wanted else [whole]
    if missing and not there:
        needed = " or ".join(filter(None, (whole, " and ".join(wanted.values()))))
        what = f"has no words for {kind.__name__}, but {listed(names)}: it needs {needed}"
        raise file_error(folder, what, missing=[whole, *missing])
