"""Jobs of the command line: pictures from a model and a request, and exported networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tightfit.apply.activations.export_denoiser import export_module, find_denoiser, first_call
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.demo.scenes import WORDS, unknown_words
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import InputError, unknown_name
from tightfit.files import replacing
from tightfit.plan.default_rates import ANY_CARD
from tightfit.report.summary import Report
from tightfit.report.timeline import draw_timeline
from tightfit.run.call_arguments import call_arguments
from tightfit.run.files import check_timeline, check_writable, output_paths, save_pictures, writing
from tightfit.run.generate import Progress, generate, profiled, stopwatch, with_loading
from tightfit.run.launched_ranks import ALONE, LaunchedRank
from tightfit.run.limits import Limits
from tightfit.run.models import DTYPES, find_model, model_title, stored_dtype
from tightfit.run.plan_options import demo_request
from tightfit.run.prompt import Prompt
from tightfit.run.run_target import RunOptions, RunTarget
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.request import Request

__all__ = ["Job", "demo_warnings", "export_model"]


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
    rank: LaunchedRank = ALONE
    written: list[Path] = field(default_factory=list)

    def prepare(self) -> None:
        """Check all arguments, before anything is loaded or written."""
        target = RunOptions(self.choices, self.limits, self.rank.device(self.device), self.dtype).target()
        self._run_target: RunTarget = target
        self._target: Device = target.device
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
        return demo_warnings(self.prompt) if self.model is None else []

    def load(self) -> None:
        """Load the model to run under the plan."""
        if self.model is None:
            self.request = demo_request(self.request)
        elapsed = stopwatch()
        parallel = self.rank.parallel(self.choices.get("context_attention"), self.choices.get("cfg_groups"))
        self._pipe, self.fitted = self._run_target.load(self._folder, self.request, parallel)
        if self._run_target.plan_target is not None:
            self._target = self._run_target.plan_target.host_of(self.fitted.plan)
        call_arguments(self._pipe, self.prompt, self.request)
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
        if self.rank.writes:
            self._write(result.pictures)
        return table

    def _write(self, pictures: list[Any]) -> None:
        metadata = {
            "prompt": self.prompt.text,
            "seed": str(self.prompt.seed),
            "plan": self.report.plan.to_json(),
            "model": model_title(self.model, self._folder),
        }
        self._outputs = output_paths(self.out, self.prompt.text, len(pictures))  # names may be taken by now
        save_pictures(pictures, self._outputs, metadata | {"Software": "tightfit"})
        self.written += self._outputs
        if self.timeline is not None:
            with writing(self.timeline):
                draw_timeline(self.report, self.timeline, self.prompt.text)
            self.written.append(self.timeline)
        if self.snapshot is not None:
            with writing(self.snapshot), replacing(self.snapshot) as partial:
                self._target.write_snapshot(partial)
            self.written.append(self.snapshot)

    def summary(self) -> dict[str, Any]:
        """Return what `--json` prints. Predictions are null if the plan has no forecast."""
        report, forecast = self.report.to_mapping(), {phase.name: phase for phase in self.report.plan.forecast}
        peaks = {name: phase.peak_bytes for name, phase in forecast.items()}
        phases = [{**phase, "predicted_peak_bytes": peaks.get(phase["name"])} for phase in report["phases"]]
        seconds = sum(phase.seconds for phase in forecast.values()) if forecast else None
        return report | {
            "predicted": {"peak_bytes": max(peaks.values(), default=None), "seconds": seconds},
            "phases": phases,
            "seed": self.prompt.seed,
            "outputs": [str(path) for path in self._outputs],
        }


def demo_warnings(prompt: Prompt) -> list[str]:
    """Return a warning about words of `prompt` that the demo model does not know, if there are any."""
    unknown = unknown_words(prompt.text)
    if not unknown:
        return []
    words = [word[:40] for word in dict.fromkeys(unknown)]
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return [f"the demo model does not know: {', '.join(words[:20])}{more}. It knows: {', '.join(sorted(WORDS))}"]


def export_model(
    model: str | None,
    out: Path,
    request: Request | None = None,
    *,
    name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> ExportedFile:
    """Export the denoiser of `model` (folder or hub id; None: the demo model) for `request` to `out`.

    Only configurations are read. Fields that `request` leaves open have the pipeline's defaults; `inputs` are further
    arguments of its call, by name: a negative prompt, or the prompt if its length in tokens matters. `dtype` is the
    compute dtype (default: that of `tightfit run` on `device`: float32 on the CPU, else as stored). `name` selects one
    of several denoisers.

    Raises InputError for an unknown device or dtype and a path that cannot be written, ModelError for what cannot be
    loaded or exported, RequestError for what the pipeline does not accept, PlanError for an unknown `name`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(unknown_name("dtype", dtype, DTYPES), dtype=dtype)
    on_cpu = choose_device(device).torch_device.type == "cpu"
    check_writable(out)
    folder = find_model(model)
    request = request or Request()
    if model is None:
        request = demo_request(request)
    default = "float32" if on_cpu else stored_dtype(folder.components)
    exported_file = _export(folder, getattr(torch, dtype or default), request, name, inputs)
    exported_file.save(out)
    return exported_file


def _export(
    folder: ModelFolder, dtype: torch.dtype, request: Request, name: str | None, inputs: Mapping[str, Any] | None
) -> ExportedFile:
    """Simulate a call to get the denoiser's inputs, then export it with these."""
    pipe = build_folder(folder, dtype)
    module = find_denoiser(pipe, name)
    with unlimited_card(ANY_CARD) as card:
        simulation = SimulationRun(pipe, card, {"level": 0}, request)
        given = first_call(module, lambda: simulation.run(inputs))
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), given)
        del given
        simulation.fitted.undo()
        del module.forward  # set by the simulation
    return export_module(module, *args, **kwargs)
