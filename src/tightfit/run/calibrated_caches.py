"""Calibrations of step caches on disk, and which of them are of a pipeline, or of a folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.headers import read_header
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.errors import TightfitError
from tightfit.files import cache_folder, read_regular, replacing
from tightfit.measure.denoisers import find_denoisers
from tightfit.measure.modules import find_components
from tightfit.run.limits import Limits
from tightfit.schema.cache_calibration import CacheCalibration

__all__ = ["PipelineIdentity", "keep_calibration", "with_calibrations"]

SAMPLED = 32  # weights of each denoiser
KEPT = 8  # calibrations of one kind of pipeline


class PipelineIdentity:
    """What a pipeline is known by: its classes, and a few weights of its denoisers."""

    def __init__(self, pipe: Any, folder: ModelFolder | None = None) -> None:
        """`pipe` follows no plan. It may have no weights: a few numbers are then read from its `folder`."""
        classes, weights = [f"pipeline {type(pipe).__name__}"], list[float]()
        if (scheduler := getattr(pipe, "scheduler", None)) is not None:
            classes.append(f"scheduler {type(scheduler).__name__}")
        files = {part.name: part.weight_files for part in folder.components} if folder is not None else {}
        for name, network in sorted(find_denoisers(find_components(pipe)).items()):
            classes.append(f"{name} {type(network).__name__}")
            tensors = {key: each for key, each in network.state_dict().items() if each.is_floating_point()}
            weights += _sampled(tensors, None if folder is None else files[name])
        self.weights = tuple(weights)
        name = hashlib.sha256("\0".join(classes).encode()).hexdigest()
        self.file = cache_folder() / "cache-calibrations" / f"{name}.json"  # of pipelines of these classes


def _sampled(tensors: Mapping[str, torch.Tensor], files: Sequence[Path] | None) -> list[float]:
    """Return the middle elements of SAMPLED tensors, evenly spaced by name, as in `files` if these are given."""
    names = sorted(name for name, each in tensors.items() if each.numel() and each.ndim)
    chosen = names[:: max(len(names) // SAMPLED, 1)][:SAMPLED]
    places = {name: tuple(length // 2 for length in tensors[name].shape) for name in chosen}
    if files is None:
        return [math.nan if tensors[name].is_meta else float(tensors[name][place]) for name, place in places.items()]
    headers = {file: read_header(file)[1] for file in files}
    holders = {name: file for file, header in headers.items() for name in header}
    return [_read(holders[name], name, place) if name in holders else math.nan for name, place in places.items()]


def _read(file: Path, name: str, place: tuple[int, ...]) -> float:
    with safe_open(file, framework="pt") as opened:
        return float(opened.get_slice(name)[tuple(slice(index, index + 1) for index in place)])


def _read_all(identity: PipelineIdentity) -> list[CacheCalibration]:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, TightfitError):
        return [CacheCalibration.from_mapping(fields) for fields in json.loads(read_regular(identity.file))]
    return []


def with_calibrations(limits: Limits, subject: Any) -> Limits:
    """Return `limits` with the calibrations of `subject`, the latest first, if the planner may choose a step cache.

    `subject` is a pipeline that follows no plan, or a folder. What was looked up before stays.
    """
    if not limits.may_choose_cache or limits.calibrations is not None:
        return limits
    if isinstance(subject, ModelFolder):
        identity = PipelineIdentity(build_folder(subject, torch.float32), subject)
    else:
        identity = PipelineIdentity(subject)
    found = tuple(each for each in reversed(_read_all(identity)) if each.is_of(identity.weights))
    return limits._replace(calibrations=found)


def keep_calibration(identity: PipelineIdentity, found: CacheCalibration) -> None:
    """Write `found`, with an earlier one's trials of other strategies in as many steps. Raises OSError."""
    known = _read_all(identity)
    earlier = [each for each in known if each.is_of(found.weights) and each.steps == found.steps]
    whole = functools.reduce(CacheCalibration.merged_with, earlier, found)
    identity.file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(identity.file) as partial:
        others = [each for each in known if each not in earlier]
        partial.write_text(json.dumps([each.to_mapping() for each in [*others, whole][-KEPT:]]))
