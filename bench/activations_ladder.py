"""The ladder of the classic table, on a pipeline of Stable Diffusion 1.5's shape with random weights.

Plain float32 → half precision → channels-last → traced → memory-efficient attention: each rung adds to the one before,
all by plans of tightfit. The table is older than torch's fused attention, which diffusers takes by itself today: so
that there is something to add, the U-Net of all rungs but the last has the attention processor of that time, which
makes all scores (and the plan says "math", or tightfit would spare them). What is traced keeps the attention that it
was traced with: the last rung has a file of its own, in which attention is torch's to choose.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

from measuring import fill_at_random
from tightfit import Request, fit
from tightfit.apply.activations.export_denoiser import export_denoiser
from tightfit.catalog.known import known_model
from tightfit.checkpoint.loading import quietly
from tightfit.devices.device import Device
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments

MODEL = "sd-1.5"
Row = dict[str, Any]


@dataclass(frozen=True)
class Rung:
    """What is done, all told."""

    name: str
    dtype: torch.dtype
    channels_last: bool = False
    traced: bool = False
    spares_scores: bool = False

    def plan(self, file: Path) -> dict[str, Any]:
        attention = "auto" if self.traced or self.spares_scores else "math"
        unet: dict[str, Any] = {"channels_last": self.channels_last, "attention": attention}
        vae = {"channels_last": self.channels_last, "attention": "auto" if self.spares_scores else "math"}
        return {"components": {"unet": unet | ({"exported": str(file)} if self.traced else {}), "vae": vae}}


def rungs(half: torch.dtype) -> list[Rung]:
    return [
        Rung("plain float32", torch.float32),
        Rung(f"+ {str(half).removeprefix('torch.')}", half),
        Rung("+ channels-last", half, channels_last=True),
        Rung("+ traced", half, channels_last=True, traced=True),
        Rung("+ memory-efficient attention", half, channels_last=True, traced=True, spares_scores=True),
    ]


def half_of(device: Device) -> torch.dtype:
    """float16 on a card; on a CPU the half precision that its library of kernels takes, else bfloat16."""
    if device.kind == "cuda":
        return torch.float16
    kernels = torch.ops.mkldnn
    float16_only = kernels._is_mkldnn_fp16_supported() and not kernels._is_mkldnn_bf16_supported()
    return torch.float16 if float16_only else torch.bfloat16


def pipeline(dtype: torch.dtype, *, dry: bool) -> Any:
    model = known_model(MODEL)
    if dry:
        smaller: dict[str, dict[str, Any]] = {
            "unet": {"block_out_channels": [32, 32, 64, 64]},
            "vae": {"block_out_channels": [32, 32, 64, 64]},
            "text_encoder": {"num_hidden_layers": 1, "vocab_size": 100},
        }
        parts = {
            name: part.model_copy(update={"config": part.config | smaller.get(name, {})})
            for name, part in model.components.items()
        }
        model = model.model_copy(update={"components": parts})
    pipe = build_known(model, dtype)
    for network in find_components(pipe).values():
        fill_at_random(network)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(pipe: Any, request: Request) -> dict[str, Any]:
    return call_arguments(pipe, Prompt("a prompt", seed=0), request) | {"output_type": "pt"}


def attend(pipe: Any, rung: Rung) -> None:
    """Gives the U-Net the attention processor that the rung starts from."""
    pipe.unet.set_attn_processor(AttnProcessor2_0() if rung.spares_scores else AttnProcessor())


def picture(pipe: Any, rung: Rung, file: Path, request: Request, device: Device) -> tuple[float, int]:
    """Seconds of one picture, and the peak where the device's allocator counts (else 0)."""
    attend(pipe, rung)
    fitted = fit(pipe, plan=rung.plan(file), request=request, device=device, count_activations=False)
    try:
        with torch.no_grad(), quietly():
            if device.kind == "cuda":  # warm: kernels are chosen and loaded
                pipe(**arguments(pipe, request) | {"num_inference_steps": 1})
            pipe(**arguments(pipe, request))
        trace = fitted.report().trace
    finally:
        fitted.undo()
    return trace.seconds, trace.peak_bytes if device.allocated_bytes() is not None else 0


def export(pipe: Any, ladder: list[Rung], request: Request, folder: Path) -> dict[str, Path]:
    """A file for each rung that is traced; the others' are not there."""
    files = {rung.name: folder / f"{number}.traced" for number, rung in enumerate(ladder)}
    for rung in ladder:
        if rung.traced:
            attend(pipe, rung)
            with torch.no_grad(), quietly():
                export_denoiser(pipe, arguments(pipe, request)).save(files[rung.name])
    return files


def ladder(device: Device, rounds: int | None, *, dry: bool) -> dict[str, Any]:
    """Seconds per picture on each rung, medians of rounds; ratios to the first rung are within a round."""
    cuda = device.kind == "cuda"
    side, steps = (64, 1) if dry else (512, 50 if cuda else 4)
    request = Request(height=side, width=side, steps=steps, guidance=7.5 if cuda else 1.0)  # 1: one prediction a step
    rounds = rounds or (3 if cuda else 1)
    half = half_of(device)
    pipes = {dtype: pipeline(dtype, dry=dry) for dtype in (torch.float32, half)}
    taken: dict[str, list[float]] = {rung.name: [] for rung in rungs(half)}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = export(pipes[half], rungs(half), request, Path(folder))
        for _ in range(rounds):
            for rung in rungs(half):
                seconds, peak = picture(pipes[rung.dtype], rung, files[rung.name], request, device)
                taken[rung.name].append(seconds)
                peaks[rung.name] = max(peak, peaks.get(rung.name, 0))
                print(f"{rung.name:30} {seconds:8.2f} s", flush=True)
    rows: list[Row] = []
    for name, times in taken.items():
        ratios = [first / mine for first, mine in zip(taken["plain float32"], times, strict=True)]
        row: Row = {"rung": name, "seconds": round(statistics.median(times), 3)}
        row |= {"faster": round(statistics.median(ratios), 3), "peak_bytes": peaks[name] or None}
        rows.append(row)
    facts = {
        "model": MODEL,
        "side": side,
        "steps": steps,
        "guidance": request.guidance,
        "half": str(half).removeprefix("torch."),
    }
    return facts | {"rounds": rounds, "half_in_hardware": in_hardware(device), "rows": rows}


def in_hardware(device: Device) -> bool:
    """Whether the device multiplies in half precision by itself, or widens to float32 first."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return device.kind == "cuda" or bool(flags & {"avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"})
