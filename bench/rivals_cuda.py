"""Offloading in a CUDA card's memory: bytes and waits of whole calls, by torch's own allocator on a stand-in for CUDA.

Under tests/cuda_stub torch's CUDA build finds a card that computes nothing; allocator, streams, page-locked memory and
the order of copies are real. So what is counted here are facts that need no clock: whether a call of a known model at
its usual request runs on a card of so many GiB, the most that the allocator reserved, the bytes of a denoising step
over the link each way, the most host memory that was page-locked, and how often a step made the host wait. Weights have
their full size and no values. Each contender works in a process of its own.

Caps are the card's own size. The workspace of cuDNN's convolutions is what tightfit assumes. The host's RAM is said to
be 256 GiB to everybody, since nobody's pages are really touched. Others than tightfit that run out of memory while
decoding try again with diffusers' tiles, whose pictures are others. diffusers' own switches know no card's size: what
ran within a smaller cap, or failed with a larger one, is not run again.

    cuda_stub/run.sh python bench/rivals_cuda.py [--models sdxl] [--caps 6,8] [--only tightfit]

Rows that are in bench/results/rivals_cuda.json stay (--again: are made anew).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from measuring import RESULTS
from rivals_contenders import CONTENDERS, OURS, ROOMY, Row
from tightfit.catalog.known import known_model
from tightfit.checkpoint.loading import quietly
from tightfit.files import replacing
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments

FILE = RESULTS / "rivals_cuda.json"
MODELS = "sdxl,flux.1-dev,cogvideox-5b,qwen-image,wan-2.1-14b"
OWN_SWITCHES = [name for name in CONTENDERS if name.startswith("diffusers:")]  # which know no card's size
NAMES = [*OWN_SWITCHES, "diffusers-mm", "mmgp", OURS]
STEPS = 3  # the last of which is counted
GIB = 2**30
LARGE = 2**20  # bytes of a host tensor from which on its values are nobody's
RAM = 256 * GIB
WAITS = ("stream_syncs", "event_syncs", "device_syncs")
COUNTERS = ("bytes_P2D", "bytes_H2D", "bytes_D2P", "bytes_D2H", "launches", *WAITS)
STUB = {"STUB_COPY": "0", "STUB_CUDNN_WORKSPACE": "copies", "OMP_NUM_THREADS": "1"}


class Counters:
    """What the stand-in for CUDA counts, at the end of each step."""

    def __init__(self) -> None:
        self._get = ctypes.CDLL(None).stub_get
        self._get.restype = ctypes.c_longlong
        self.marks: list[dict[str, int]] = []

    def __getitem__(self, name: str) -> int:
        return int(self._get(name.encode()))

    def begin(self) -> None:
        """From now on the most that the allocator takes of the card counts: torch's own peak is reset by contenders."""
        ctypes.CDLL(None).stub_reset_most()

    def mark(self, pipe: Any = None, step: int = 0, time: Any = None, given: Any = None) -> Any:
        """For `callback_on_step_end`."""
        self.marks.append({name: self[name] for name in COUNTERS})
        return given

    def row(self) -> Row:
        """What the last step did."""
        before, after = self.marks[-2:]
        step = {name: after[name] - before[name] for name in COUNTERS}
        return {
            "to_card": step["bytes_P2D"] + step["bytes_H2D"],
            "to_card_pageable": step["bytes_H2D"],
            "from_card": step["bytes_D2P"] + step["bytes_D2H"],
            "waits": sum(step[name] for name in WAITS),
            "launches": step["launches"],
            "locked": self["locked_most"],
        }


# a pipeline whose weights have no values


def let_values_be() -> None:
    """Host copies of large tensors are left out: pages that nobody has touched take no memory."""
    copy, put = torch.Tensor.copy_, torch.Tensor.__setitem__

    def is_large(tensor: torch.Tensor, source: Any) -> bool:
        both = isinstance(source, torch.Tensor) and tensor.device.type == source.device.type == "cpu"
        return both and source.nbytes > LARGE

    def copy_(tensor: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        return tensor if is_large(tensor, source) else copy(tensor, source, non_blocking)

    def setitem(tensor: torch.Tensor, where: Any, source: Any) -> None:
        if not is_large(tensor, source):
            put(tensor, where, source)

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if tensor.is_pinned():
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)

    torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
    torch.Tensor.__setitem__ = setitem  # type: ignore[method-assign]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]


def let_ram_be_plenty() -> None:
    import psutil

    from tightfit.devices import ram as seam

    real = psutil.virtual_memory
    psutil.virtual_memory = lambda: SimpleNamespace(  # type: ignore[assignment]
        **real()._asdict() | {"total": RAM, "available": RAM, "free": RAM, "used": 0, "percent": 0.0}
    )
    seam._groups_with_limit = lambda: []  # type: ignore[assignment]


def let_nobody_ask_for_values(pipe: Any) -> None:
    """Schedulers ask the card which step it is, and Qwen-Image which tokens are padding: it does not know."""
    scheduler = type(pipe.scheduler)
    if hasattr(scheduler, "index_for_timestep"):
        scheduler.index_for_timestep = lambda self, timestep, schedule_timesteps=None: 0
    usual = getattr(pipe, "_extract_masked_hidden", None)

    def without_padding(self: Any, states: torch.Tensor, mask: torch.Tensor) -> Any:
        return usual(states, mask) if usual and states.device.type != "cuda" else states.unbind()

    if usual:
        type(pipe)._extract_masked_hidden = without_padding


def empty(network: nn.Module) -> None:
    """Gives `network`, whose large tensors are on "meta", memory that nobody has touched; what is tied stays tied."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    kept = nn.Parameter(new, requires_grad=False) if tensors is module._parameters else new
                    made[id(tensor)] = tensor, kept
                tensors[name] = made[id(tensor)][1]  # type: ignore[assignment]


# contenders


def automatic(pipe: Any) -> Any:
    """diffusers-mm's own choice, where RAM is plenty."""
    from diffusers_mm import managed, manager

    chooser = manager.ModelManager(strategy="auto")
    chooser._detect_available_ram_gb = lambda: (ROOMY, ROOMY)
    return managed(pipe, mm=chooser, device=torch.device("cuda:0"))


def by_profile(pipe: Any) -> Any:
    """mmgp's profile for much RAM and a small card, without the eight bits that it would store weights in."""
    from mmgp import offload

    offload.profile(pipe, offload.profile_type.HighRAM_LowVRAM, quantizeTransformer=False)
    return pipe


def within_budget(pipe: Any, asked: Any, size: int) -> Row:
    from tightfit import fit

    plan = fit(pipe, budget=size, request=asked, device="cuda", count_activations=False).plan
    placed = {name: part.described for name, part in plan.components.items()}
    return {"told_peak": plan.predicted_peak(plan.device), "placements": placed, "vae": plan.vae.described}


def one(model: str, name: str, size: int, tiles: bool) -> Row:
    """A call of `model` by contender `name`, in this process, on the stand-in's card."""
    let_values_be()
    let_ram_be_plenty()
    torch.set_grad_enabled(False)
    counters, asked = Counters(), known_model(model).request
    pipe = build_known(known_model(model), torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    let_nobody_ask_for_values(pipe)
    for network in find_components(pipe).values():
        empty(network)
    arguments = call_arguments(pipe, Prompt(PROMPT, seed=0), asked.model_copy(update={"steps": STEPS}))
    said: Row = {}
    if tiles:
        pipe.vae.enable_tiling()
    torch.cuda.init()
    try:
        with quietly():
            if name == OURS:
                said = within_budget(pipe, asked, size)
            elif name == "mmgp":
                pipe = by_profile(pipe)
            else:
                pipe = automatic(pipe) if name == "diffusers-mm" else CONTENDERS[name](pipe, torch.device("cuda:0"))
            counters.begin()
            pipe(**arguments, output_type="pt", callback_on_step_end=counters.mark)
        said |= counters.row()
    except torch.OutOfMemoryError:
        said["failed"] = _phase(counters)
    except Exception as error:  # also a result: with what it cannot work
        if "unable to find an engine" in str(error):  # no convolution's workspace could be had
            said["failed"] = _phase(counters)
        else:
            said["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    if name == "diffusers-mm":
        said["chosen"] = getattr(getattr(pipe, "mm", None), "applied_strategy", None)
    return said | {"reserved": counters["taken_most"], "tiles": tiles}


def _phase(counters: Counters) -> str:
    done = len(counters.marks)
    return "decode" if done == STEPS else "denoise" if done else "before a step was done"


# all of them


def played(model: str, name: str, size: int, limit: float, *, tiles: bool) -> Row:
    """`one`, in a process of its own, on a card of `size` bytes."""
    words = json.dumps({"model": model, "name": name, "size": size, "tiles": tiles})
    environment = os.environ | STUB | {"STUB_TOTAL": str(size)}
    command = [sys.executable, "-W", "ignore", __file__, "--one", words]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, timeout=limit, check=False, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} s", "tiles": tiles}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    row = json.loads(lines[-1]) if lines else {"error": f"ended with {done.returncode}: {done.stderr[-300:]}"}
    print(f"{model} {name} {size / GIB:g} GiB{' tiles' * tiles}: {time.monotonic() - begun:.0f} s {row}", flush=True)
    return row | {"tiles": tiles}


def known_from(larger: Row | None, name: str, size: int) -> Row | None:
    """What is known without running it: of those to whom the card's size is nothing, from the next larger card."""
    if larger is None or name not in OWN_SWITCHES or larger.get("error", "").startswith("stopped"):
        return None
    if "failed" in larger or "error" in larger or larger["reserved"] <= size:
        return {key: larger[key] for key in larger if key not in ("cap", "model", "contender", "request")}
    return None


def row_of(model: str, name: str, size: int, larger: Row | None, limit: float) -> Row:
    if (known := known_from(larger, name, size)) is not None:
        return known
    tiles = bool(larger and larger.get("tiles"))
    row = played(model, name, size, limit, tiles=tiles)
    if row.get("failed") == "decode" and name != OURS and not tiles:
        row = played(model, name, size, limit, tiles=True)
    return row


def versions() -> dict[str, str]:
    found = {}
    for library in ("torch", "diffusers", "diffusers-mm", "mmgp"):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--caps", default="6,8,12,16,24", help="GiB")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--limit", type=float, default=300, help="seconds after which somebody is stopped")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    wishes = parser.parse_args()
    if wishes.one:
        print("\n" + json.dumps(one(**wishes.one)))
        return
    caps = sorted((int(size) * GIB for size in wishes.caps.split(",")), reverse=True)
    for model in wishes.models.split(","):
        for name in wishes.only.split(","):
            larger: Row | None = None
            for cap in caps:
                larger = _kept(model, name, cap, larger, wishes)


def _kept(model: str, name: str, cap: int, larger: Row | None, wishes: argparse.Namespace) -> Row:
    """The row of these, which is in the file afterwards."""
    about = {"model": model, "contender": name, "cap": cap}
    rows = _rows()
    there = next((row for row in rows if row.items() >= about.items()), None)
    if there is not None and not wishes.again:
        return there
    asked = known_model(model).request
    row = {**about, "request": asked.described, **row_of(model, name, cap, larger, wishes.limit)}
    others = [each for each in _rows() if not each.items() >= about.items()]
    written = {"versions": versions(), "rows": sorted([*others, row], key=_place)}
    with replacing(FILE) as partial:
        partial.write_text(json.dumps(written, indent=1) + "\n")
    return row


def _rows() -> list[Row]:
    return list(json.loads(FILE.read_text())["rows"]) if FILE.exists() else []


def _place(row: Row) -> tuple[int, int, int]:
    return MODELS.split(",").index(row["model"]), NAMES.index(row["contender"]), int(row["cap"])


if __name__ == "__main__":
    main()
