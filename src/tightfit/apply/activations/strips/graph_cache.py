"""Exported programs and their strip plans in files: written as JSON, checked when read, never run as code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.exporting import HERE
from tightfit.apply.activations.serialization import (
    find_operation,
    open_bundle,
    part_of,
    read_argument,
    write_bundle,
    written_argument,
)
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.activations.strips.program import Node, Program, Ref
from tightfit.apply.activations.strips.stages import Stage, StageGraph
from tightfit.apply.activations.strips.strip_plan import StripPlan, find_strip_plan, planned_stages_of
from tightfit.errors import ModelError
from tightfit.files import cache_folder, code_mark, mark_of_modules
from tightfit.measure.meta_copy import fingerprint
from tightfit.schema.footprint import FeatureMaps

__all__ = [
    "SHIPPED",
    "check_program",
    "kept_program",
    "kept_strip_plan",
    "mark_of_call",
    "mark_of_makers",
    "program_from_json",
    "program_to_json",
    "strip_plan_from_json",
    "strip_plan_to_json",
]


MOST_BYTES = 2**26  # limit of all files in a folder; an image's program has some ten thousand
_PROGRAM, _CONSTANTS, _STRIP_PLAN = "program.json", "constants.safetensors", "strip_plan.json"
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_LIBRARIES = {"diffusers", "transformers"}  # programs depend on their code, as on torch's operations
SHIPPED = "catalog/programs"  # folder of the package with programs of known models
_MAKERS = (  # modules that programs depend on
    "apply/activations/exporting.py",
    "apply/activations/outputs.py",
    "apply/activations/strips/export_graph.py",
    "apply/activations/strips/called_program.py",
    "apply/activations/strips/program.py",
    "apply/activations/strips/row_axes.py",
    "apply/activations/strips/long_clips.py",
    "apply/activations/strips/workarounds.py",
    "apply/activations/strips/graph_cache.py",
    "measure/meta_copy.py",
)


def mark_of_makers() -> str:
    """Return a digest of the code that makes programs and their cache keys."""
    return mark_of_modules(*_MAKERS)


def mark_of_call(double: nn.Module, method: str, form: object, arguments: Sequence[Any]) -> str:
    """Return a digest of everything that the Program of a call depends on; "" if it cannot be determined.

    `double` is the network without weights; `arguments` are those of `method`, flattened, with tree spec `form`.
    Tensors among them count by shape and dtype, constant tables of the network by value.
    """
    network = fingerprint(double)
    given = list(map(_described, arguments))
    if not network or None in given:
        return ""
    stores = {type(part).__module__.partition(".")[0] for part in double.modules()}.intersection(_LIBRARIES)
    versions = [
        f"{store} {version(store).partition('+')[0]}" for store in sorted({"torch", *stores})
    ]  # without the suffix for CUDA or CPU
    facts = (network, method, str(form), given, str(torch.get_default_dtype()), mark_of_makers(), versions)
    digest = hashlib.sha256(repr(facts).encode())
    for part in double.modules():
        for value in tree_leaves(vars(part)):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _described(value: Any) -> object:
    """What a program depends on of an argument; None if it cannot be determined."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, torch.Generator):  # mostly ignored; programs that draw from it cannot be written to a file
        return torch.Generator.__name__
    return repr(value) if type(value) in _PLAIN else None


def kept_program(mark: str, double: nn.Module, inputs: Sequence[torch.Tensor], make: Callable[[], Program]) -> Program:
    """Return the Program of `double` for `inputs` cached under `mark`; otherwise call `make` and cache the result.

    Without a mark, nothing is cached. Raises UnsupportedGraph as `make` does, or did when it was called before.
    """
    if not mark:
        return make()
    own, name = _folder("programs"), f"{mark}.zip"
    for folder in filter(None, (own, Path(str(files("tightfit"))) / SHIPPED)):
        kept = _read_entry(folder / name, mark, double, inputs)
        if isinstance(kept, Program):
            return kept
        if kept is not None:
            raise UnsupportedGraph(kept)
    try:
        program = make()
    except UnsupportedGraph as reason:
        if own is not None and not _is_passing(reason):
            _write(own / name, {"mark": mark, "reason": str(reason)}, {})
        raise
    if own is not None:
        with contextlib.suppress(ModelError):  # it cannot be written to a file
            _write(own / name, {"mark": mark, **program_to_json(program)}, program.constants)
    return program


def kept_strip_plan(mark: str, program: Program, working: int, maps: FeatureMaps) -> StripPlan:
    """Return the strip plan of `program`, whose cache key is `mark`; if it is not cached yet, find and cache it."""
    folder = _folder("strip_plans")
    if not mark or folder is None:
        return find_strip_plan(program, working, maps)
    mark = f"{mark}-{code_mark():.16}-{working}-{maps}"
    file = folder / f"{mark}.zip"
    with contextlib.suppress(Exception), open_bundle(file) as bundle:  # damage counts as missing
        return strip_plan_from_json(_words(file, bundle, _STRIP_PLAN, mark), program)
    strip_plan = find_strip_plan(program, working, maps)
    _write_parts(file, {_STRIP_PLAN: json.dumps({"mark": mark, **strip_plan_to_json(strip_plan)})})
    return strip_plan


def _folder(name: str) -> Path | None:
    """Return the cache folder `name`; None if the user has no home directory."""
    with contextlib.suppress(RuntimeError):
        return cache_folder() / name
    return None


def _is_passing(reason: UnsupportedGraph) -> bool:
    """Whether the reason may be temporary."""
    cause = reason.__cause__ and reason.__cause__.__cause__
    return isinstance(cause, MemoryError | OSError | RecursionError)


def _read_entry(file: Path, mark: str, double: nn.Module, inputs: Sequence[torch.Tensor]) -> Program | str | None:
    """Return the content of `file`, a Program or why there is none; None if it is missing or unusable."""
    with contextlib.suppress(Exception), open_bundle(file) as bundle:  # damage counts as missing
        written = _words(file, bundle, _PROGRAM, mark)
        if "reason" in written:
            return str(written["reason"])
        program = program_from_json(written, load(part_of(bundle, _CONSTANTS)))
        check_program(program, _weights(double), inputs)
        return program
    return None


def _words(file: Path, bundle: zipfile.ZipFile, part: str, mark: str) -> dict[str, Any]:
    """Read the JSON in a part of `bundle`, and mark its `file` as used; ValueError under another mark."""
    written: dict[str, Any] = json.loads(part_of(bundle, part))
    if written["mark"] != mark:
        raise ValueError(written["mark"])
    with contextlib.suppress(OSError):
        file.touch()
    return written


def _weights(double: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by all their names."""
    parameters = double.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(double.named_buffers(remove_duplicate=False))}


def _write(file: Path, written: dict[str, Any], constants: dict[str, torch.Tensor]) -> None:
    if any(type(table) is not torch.Tensor or table.is_meta for table in constants.values()):
        return
    tables = {name: table.clone(memory_format=torch.contiguous_format) for name, table in constants.items()}
    with contextlib.suppress(SafetensorError):
        _write_parts(file, {_PROGRAM: json.dumps(written), _CONSTANTS: save(tables)})


def _write_parts(file: Path, parts: Mapping[str, str | bytes]) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(file, parts)
        _evict_old_files(file.parent)


def _evict_old_files(folder: Path) -> None:
    """Remove the least recently used files until the others take at most MOST_BYTES."""
    used = sorted(((file.stat().st_mtime, file) for file in folder.iterdir()), reverse=True)
    left = MOST_BYTES
    for _, file in used:
        left -= file.stat().st_size
        if left < 0:
            file.unlink(missing_ok=True)


_PLACEHOLDERS = ("input", "weight", "constant")


def program_to_json(program: Program) -> dict[str, Any]:
    """Return `program` as JSON, without its constants' values. ModelError for operations outside ATen."""
    nodes = [_written(node) for node in program.nodes]
    return {"nodes": nodes, "inputs": list(program.inputs), "outputs": list(program.outputs)}


def _written(node: Node) -> list[Any]:
    if node.op not in _PLACEHOLDERS:
        find_operation(node.op)
    args, kwargs = _word(node.args), {key: _word(value) for key, value in node.kwargs.items()}
    known = list(node.shape), _word(node.dtype), node.axis, node.varying
    return [node.op, args, kwargs, *known, node.name, node.output]


def _word(value: Any) -> Any:
    return written_argument(value, lambda item: item.node if isinstance(item, Ref) else None)


def program_from_json(written: Mapping[str, Any], constants: dict[str, torch.Tensor]) -> Program:
    """Return the Program that `written` encodes. Invalid data raises ModelError or some Python error."""
    nodes = tuple(_read(*fields) for fields in written["nodes"])
    return Program(nodes, tuple(written["inputs"]), tuple(written["outputs"]), constants)


def _read(
    op: str, args: Any, kwargs: Any, shape: Any, dtype: Any, axis: Any, varying: Any, name: str, output: Any
) -> Node:
    if op not in _PLACEHOLDERS:
        find_operation(op)
    named = {key: _meaning(value) for key, value in kwargs.items()}
    return Node(op, tuple(_meaning(args)), named, tuple(shape), _meaning(dtype), axis, varying, name, output)


def _meaning(value: Any) -> Any:
    return read_argument(value, Ref, torch.device(HERE))


def check_program(program: Program, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if `program` uses values too early, or other weights or inputs than these."""
    given = dict(zip(program.inputs, inputs, strict=True))
    for place, node in enumerate(program.nodes):
        if not all(0 <= source < place for source in node.sources):
            raise ValueError(f"node {place} takes what is not there yet")
        if node.axis is not None and not 0 <= node.axis < len(node.shape):
            raise ValueError(f"node {place} has no axis {node.axis}")
        there = {
            "input": given.get(place),
            "weight": weights.get(node.name),
            "constant": node.name in program.constants,
        }
        found = there.get(node.op, True)
        if found is None or found is False:
            raise ValueError(f"node {place} is an unknown {node.op}, {node.name}")
        if isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) != (node.shape, node.dtype):
            raise ValueError(f"node {place}, {node.name}, is {node.dtype} {node.shape}, and here {tuple(found.shape)}")
    if not all(0 <= index < len(program.nodes) for index in program.outputs):
        raise ValueError(f"outputs {program.outputs} of {len(program.nodes)} nodes")


def strip_plan_to_json(strip_plan: StripPlan) -> dict[str, Any]:
    """Return as JSON what takes long to find of `strip_plan`: its stages, and the number of strips of each."""
    passes = [[*map(list, vars(stage).values()), len(strips), ahead] for stage, strips, ahead in strip_plan.passes]
    return {
        "in_order": strip_plan.graph.in_order,
        "in_host": sorted(strip_plan.in_host),
        "passes": passes,
    }


def strip_plan_from_json(written: Mapping[str, Any], program: Program) -> StripPlan:
    """Return the strip plan of `program` that `written` encodes. Invalid data raises some Python error."""
    graph = StageGraph(program, in_order=written["in_order"])
    planned = ((Stage(*map(tuple, indices)), count, ahead) for *indices, count, ahead in written["passes"])
    return StripPlan(graph, frozenset(written["in_host"]), planned_stages_of(graph, planned))
