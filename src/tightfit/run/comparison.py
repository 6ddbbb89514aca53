"""Draws with lossy techniques and without, measures how much the pictures differ, and writes both side by side."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from tightfit.checkpoint.folder import ModelFolder
from tightfit.devices.memory import trim_heap
from tightfit.errors import BudgetTooSmall, InputError
from tightfit.measure.picture_difference import mean_psnr, picture_differences
from tightfit.report.comparison import Comparison
from tightfit.report.comparison_sheet import SheetRow, write_sheet
from tightfit.run.call_arguments import call_arguments
from tightfit.run.files import check_writable, output_paths, writing
from tightfit.run.generate import Progress, Result, generate
from tightfit.run.job import demo_warnings
from tightfit.run.limits import Limits
from tightfit.run.load import Loaded
from tightfit.run.models import find_model, model_title
from tightfit.run.plan_changes import lossless_choices
from tightfit.run.plan_options import demo_request
from tightfit.run.planning_context import PlannedFolder
from tightfit.run.prompt import Prompt
from tightfit.run.run_target import RunOptions, RunTarget
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.results import PictureDifference

__all__ = ["CALLS", "ComparisonJob"]

CALLS = ("lossy", "lossless")  # in the order in which they run: what a process does once is not counted as a speed-up
TO_ADD = "add what is lossy, e.g. --cache first-block or --set components.NAME.storage=float8_e4m3fn"
MOST_ROWS = 9  # of the picture that is written


class _ComparedCall(NamedTuple):
    """What one of the two calls runs on, and its plan, if there is a budget."""

    target: RunTarget
    made: PlannedFolder | None


@dataclass
class ComparisonJob:
    """One `tightfit compare`: `prepare`, `plan`, then `load` and `draw` for each of CALLS, then `finish`."""

    prompt: Prompt
    request: Request
    options: RunOptions
    model: str | None = None
    out: Path | None = None
    notes: list[str] = field(default_factory=list)

    def prepare(self) -> None:
        """Check all arguments, before anything is planned, loaded or written.

        InputError if no option is lossy; else as `RunOptions.target`, `output_paths` and `find_model`.
        """
        target = self.options.target()
        if not _may_be_lossy(self.options):
            raise InputError(f"with {_described(self.options)}, nothing changes the pictures: {TO_ADD}")
        self._calls = {"lossy": _ComparedCall(target, None)}
        check_writable(self._path())
        self._folder: ModelFolder = find_model(self.model)
        if self.model is None:
            self.request = demo_request(self.request)
        self._results: dict[str, Result] = {}

    def _path(self) -> Path:
        (path,) = output_paths(self.out, f"compared {self.prompt.text}", 1)
        return path

    def warnings(self) -> list[str]:
        """Return a warning about words of the prompt that the demo model does not know, if there are any."""
        return demo_warnings(self.prompt) if self.model is None else []

    def plan(self) -> None:
        """Plan both calls, if there is a budget, while nothing is loaded.

        BudgetTooSmall if one of them does not fit, InputError if the plan is lossless.
        """
        target = self._calls["lossy"].target
        made = target.plan(self._folder, self.request)
        if made is not None:
            self._check(made.plan)
            self._calls = {"lossy": _ComparedCall(target, made), "lossless": self._planned_without(target)}

    def _check(self, plan: Plan) -> None:
        if plan.lossless:
            raise InputError(
                f"with {_described(self.options)}, the plan is lossless, with nothing to compare: {TO_ADD}"
            )

    def _planned_without(self, lossy: RunTarget) -> _ComparedCall:
        """Plan the call without lossy techniques: within the same budget or, if that is too small, all free memory."""
        limits = self.options.limits or Limits(None)
        cache = limits.cache if limits.cache is not None and limits.cache.lossless else None
        target = RunOptions({}, limits._replace(allow=(), cache=cache, quality=None), *self._where).target()
        try:
            return _ComparedCall(target, target.plan(self._folder, self.request))
        except BudgetTooSmall as error:
            if limits.budget is None:
                raise
            self.notes.append(f"the lossless call had all free memory instead of a budget: {error}")
        dtype = self.options.dtype
        target = RunOptions({}, Limits(None, cache=cache), lossy.device.name, dtype).target()
        return _ComparedCall(target, target.plan(self._folder, self.request))

    @property
    def _where(self) -> tuple[str | None, str | None]:
        return self.options.device, self.options.dtype

    def load(self, name: str) -> None:
        """Load the model for the call `name`, after the one of the call before is freed."""
        self._loaded: Loaded | None = None
        gc.collect()
        trim_heap()
        target, made = self._calls[name]
        self._loaded = target.load(self._folder, self.request, made=made)
        pipe, fitted = self._loaded
        if name == "lossy" and made is None:
            self._check(fitted.plan)
            choices = lossless_choices(self.options.choices, fitted.plan)
            self._calls["lossless"] = _ComparedCall(RunOptions(choices, None, *self._where).target(), None)
        call_arguments(pipe, self.prompt, self.request)

    def draw(self, name: str, progress: Progress | None = None) -> None:
        """Make the call `name` with the model that was loaded for it. Raises as `generate`."""
        assert self._loaded is not None
        self._results[name] = generate(*self._loaded, self.prompt, self.request, progress)
        for picture in self._results[name].pictures:
            _frames(picture)  # raises for what is no picture

    def finish(self) -> Comparison:
        """Compare the pictures, and write them side by side."""
        self._loaded = None
        plain, lossy = self._results["lossless"], self._results["lossy"]
        pairs = [_framewise(*pair) for pair in zip(plain.pictures, lossy.pictures, strict=True)]
        rows = [row for number, frames in enumerate(pairs) for row in self._rows(number, len(pairs), frames)]
        if len(rows) > MOST_ROWS:
            self.notes.append(f"the picture shows the first {MOST_ROWS} rows of {len(rows)}")
        differences = tuple(_mean([row.difference for row in frames]) for frames in pairs)
        comparison = Comparison(plain.report, lossy.report, differences, tuple(self.notes))
        metadata = {
            "prompt": self.prompt.text,
            "seed": str(self.prompt.seed),
            "plan": lossy.report.plan.to_json(),
            "reference": plain.report.plan.to_json(),
            "model": model_title(self.model, self._folder),
            "Software": "tightfit",
        }
        self.written = self._path()  # names may be taken by now
        with writing(self.written):
            write_sheet(comparison, rows[:MOST_ROWS], self.written, metadata)
        return comparison

    def _rows(self, number: int, count: int, frames: Sequence[SheetRow]) -> list[SheetRow]:
        """Return the rows that show a picture: a video's first, middle and last frame."""
        shown = sorted({0, len(frames) // 2, len(frames) - 1})
        seed = [f"seed {self.prompt.seed + number}"] * (count > 1)
        of = f"of {len(frames)}"
        frame = {index: [f"frame {index + 1} {of}"] * (len(frames) > 1) for index in shown}
        return [frames[index]._replace(label=", ".join([*seed, *frame[index]])) for index in shown]


def _may_be_lossy(options: RunOptions) -> bool:
    """Return whether `options` may give a lossy plan: a level, whose tiles may be, depends on the pictures' size."""
    limits = options.limits
    if limits is not None:
        return bool(limits.allow) or (limits.cache is not None and not limits.cache.lossless)
    return bool(options.choices.get("level")) or not Plan.from_mapping(options.choices).lossless


def _described(options: RunOptions) -> str:
    """Return what the options say of the plan, as text."""
    limits = options.limits
    if limits is None:
        return ", ".join(f"{name}={value}" for name, value in options.choices.items())[:200] or "the defaults"
    said = [f"a budget of {limits.budget.described}"] if limits.budget else ["all free memory"]
    said += [f"allow={', '.join(limits.allow)}"] if limits.allow else []
    return ", ".join([*said, *([limits.cache.described] if limits.cache else [])])


def _framewise(plain: Any, lossy: Any) -> list[SheetRow]:
    """Return the frames of a picture or a video, each with how much it differs."""
    pairs = zip(_frames(plain), _frames(lossy), strict=True)
    return [SheetRow("", a, b, *picture_differences(_tensor(a), _tensor(b))) for a, b in pairs]


def _frames(picture: Any) -> list[Image.Image]:
    """Return the frames of a video, or the one picture. InputError for what is neither."""
    frames = picture if isinstance(picture, list) else [picture]
    for frame in frames:
        if not isinstance(frame, Image.Image):
            raise InputError(f"compare takes pictures and videos, and this pipeline returns {type(frame).__name__}")
    return frames


def _tensor(picture: Image.Image) -> torch.Tensor:
    """Return a picture as [1, C, H, W] with values from 0 to 1."""
    known = picture if picture.mode in ("L", "RGB", "RGBA", "I;16") else picture.convert("RGB")
    values = np.asarray(known)
    most = np.iinfo(values.dtype).max
    pixels = values.reshape(*values.shape[:2], -1).astype(np.float64) / most
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def _mean(frames: Sequence[PictureDifference]) -> PictureDifference:
    return PictureDifference(mean_psnr([each.psnr for each in frames]), fmean(each.ssim for each in frames))
