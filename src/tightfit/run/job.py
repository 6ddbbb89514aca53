"""`tightfit run` as an object: prepare (checks, nothing loaded), load, run, summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightfit.apply.fitting import Fitted
from tightfit.checkpoint.folder import ModelFolder
from tightfit.demo.grammar import WORDS, unknown_words
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import InputError, unknown_name
from tightfit.files import replacing
from tightfit.report.summary import Report
from tightfit.report.timeline import draw_timeline
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.files import check_timeline, check_writable, output_paths, save_pictures
from tightfit.run.generate import Progress, generate, profiled, stopwatch, with_loading
from tightfit.run.load import load, load_made
from tightfit.run.models import DTYPES, find_model, stored_dtype
from tightfit.run.plan_options import Limits, demo_request
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.run.planning_context import plan_within
from tightfit.schema.footprint import Request
from tightfit.schema.plan import Plan

__all__ = ["Job"]


@dataclass
class Job:
    """One `tightfit run`. Its methods are called in the order of their definition."""

    prompt: Prompt
    request: Request
    choices: dict[str, Any]
    limits: Limits | None = None
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    out: Path | None = None
    timeline: Path | None = None
    snapshot: Path | None = None
    written: list[Path] = field(default_factory=list)

    def prepare(self) -> None:
        """Check all arguments, before anything is loaded or written."""
        Plan.from_mapping(self.choices)
        self._plan_target: PlanTarget | None = (
            plan_target_of(self.limits, self.device) if self.limits is not None else None
        )
        named = self.device or self.choices.get("device")
        self._target: Device = self._plan_target.devices[0] if self._plan_target else choose_device(named)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(unknown_name("dtype", self.dtype, DTYPES), dtype=self.dtype)
        if self.snapshot is not None:
            self._target.check_history()
        if self.timeline is not None:
            check_timeline(self.timeline)
        self._outputs = output_paths(self.out, self.prompt.text, self.request.batch)
        self._check_paths([path for path in (*self._outputs, self.timeline, self.snapshot) if path is not None])
        self._folder: ModelFolder = find_model(self.model)

    def _check_paths(self, paths: list[Path]) -> None:
        """InputError if one of `paths` cannot be written, or two are the same."""
        for path in paths:
            check_writable(path)
        places = [path.resolve() for path in paths]
        for path, place in zip(paths, places, strict=True):
            if places.count(place) > 1:
                raise InputError(f"{path} was asked for twice: give each file a name of its own", path=str(path))

    def warnings(self) -> list[str]:
        """Return a warning about words of the prompt that the demo model does not know, if there are any."""
        unknown = unknown_words(self.prompt.text) if self.model is None else []
        if not unknown:
            return []
        words = ", ".join(dict.fromkeys(unknown))
        return [f"the demo model does not know: {words}. It knows: {', '.join(sorted(WORDS))}"]

    def load(self) -> None:
        """Load the model to run under the plan."""
        if self.model is None:
            self.request = demo_request(self.request)
        elapsed = stopwatch()
        default = "float32" if self._target.torch_device.type == "cpu" else stored_dtype(self._folder.components)
        dtype = self.dtype or default
        if self._plan_target is None and not self.choices and self._target.kind == "cuda":
            self._plan_target = PlanTarget(Limits(None), (self._target,))
        if self._plan_target is not None:
            made = plan_within(self._folder.path, self.request, self._plan_target, dtype)
            self._target = self._plan_target.host_of(made.plan)
            self._pipe, fitted = load_made(self._folder, dtype, self._plan_target, made)
        else:
            choices = {name: value for name, value in self.choices.items() if name != "device"} or {"level": 0}
            self._pipe, fitted = load(
                self._folder.path, plan=choices, request=self.request, device=self._target, dtype=dtype
            )
        call_arguments(self._pipe, self.prompt, self.request)
        self.fitted: Fitted = fitted
        self._loading = elapsed()

    def run(self, progress: Progress | None = None, *, profile: bool = False) -> str:
        """Generate and write all outputs; return the profiler's table, or ""."""
        weights, table = self.fitted.live().weights, ""
        if self.snapshot is not None:
            self._target.record_history()

        def work() -> Any:
            return generate(self._pipe, self.fitted, self.prompt, self.request, progress)

        result, table = profiled(work) if profile else (work(), "")
        self.report: Report = with_loading(result.report, self._loading, weights)
        self._write(result.pictures)
        return table

    def _write(self, pictures: list[Any]) -> None:
        metadata = {
            "prompt": self.prompt.text,
            "seed": str(self.prompt.seed),
            "plan": self.report.plan.to_json(),
            "model": self._folder.path.name if self.model else "tightfit demo model",
        }
        self._outputs = output_paths(self.out, self.prompt.text, len(pictures))  # names may be taken by now
        save_pictures(pictures, self._outputs, metadata | {"Software": "tightfit"})
        self.written += self._outputs
        if self.timeline is not None:
            draw_timeline(self.report, self.timeline, self.prompt.text)
            self.written.append(self.timeline)
        if self.snapshot is not None:
            with replacing(self.snapshot) as partial:
                self._target.write_snapshot(partial)
            self.written.append(self.snapshot)

    def summary(self) -> dict[str, Any]:
        """Return what `--json` prints. Predictions are null if the plan has no forecast."""
        report, told = self.report.to_mapping(), {phase.name: phase for phase in self.report.plan.forecast}
        peaks = {name: phase.peak_bytes for name, phase in told.items()}
        phases = [{**phase, "predicted_peak_bytes": peaks.get(phase["name"])} for phase in report["phases"]]
        seconds = sum(phase.seconds for phase in told.values()) if told else None
        return report | {
            "predicted": {"peak_bytes": max(peaks.values(), default=None), "seconds": seconds},
            "phases": phases,
            "seed": self.prompt.seed,
            "outputs": [str(path) for path in self._outputs],
        }
