"""bench/rivals.py on a CUDA card: whole calls, while torch's allocator may have no more than a budget.

Pipelines have their full size and random weights, in bfloat16. The weights are made once, in RAM; everybody works in a
process forked from there, so that each finds the card untouched, and calls twice: the second call counts. All do a few
steps; the rest of the usual ones are taken to be like the last two. tightfit follows the plan that it makes for the
budget, whose peak and step stand beside what was measured. Where the autoencoder is what does not fit, a rival tries
again with diffusers' tiles, whose pictures are others.

    python bench/rivals_gpu.py [--models sdxl] [--budgets 6,8]       others' rows stay; a model takes about ten minutes
    python bench/rivals_gpu.py --dry       a small picture of sd-1.5 on the CPU, without others; writes no results
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or whoever asks for cards while being imported opens one, here
import torch

from measuring import RESULTS, fill_at_random, write
from rivals_contenders import CONTENDERS, MODELS, OURS, STEPS, Clock, Row, requests_of
from tightfit import Budget, fit, make_plan, measure_footprint
from tightfit.catalog.known import known_model
from tightfit.checkpoint.loading import quietly
from tightfit.devices.choose import choose_device
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.planning_context import machine_of, measured_machine
from tightfit.schema.footprint import Footprint
from tightfit.schema.request import Request
from weights_gpu import forked

NAME = "rivals-cuda"
ROOM = 16 * 2**30  # bytes, and
SMALL = {"height": 256, "width": 256}  # for --dry


def calls(
    pipe: Any, way: Callable[[], Any], asked: Request, size: int, *, cuda: bool, steps: int = STEPS, times: int = 2
) -> Row:
    """Calls, in this process, for which torch's allocator may have `size` bytes of a card; the last one counts."""
    if cuda:
        share = size / torch.cuda.get_device_properties(0).total_memory  # a card of 24 GB has less than 24 GiB
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    torch.set_num_threads(os.cpu_count() or 1)
    clock = Clock(_event, lambda earlier, later: earlier.elapsed_time(later) / 1000) if cuda else _plain_clock()
    arguments = call_arguments(pipe, Prompt(PROMPT, seed=0), asked.model_copy(update={"steps": steps}))
    try:
        ready = way()
        for number in range(times):
            arguments["generator"] = torch.Generator().manual_seed(number)
            clock.start()
            with torch.no_grad(), quietly():
                ready(**arguments, output_type="pt", callback_on_step_end=clock.mark)
            clock.stop()
            if cuda:
                torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return {"failed": "decoding" if clock.steps == steps else "before"}
    row = clock.row(asked.steps or STEPS)
    return row | ({"peak": torch.cuda.max_memory_reserved()} if cuda else {})


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _plain_clock() -> Clock:
    return Clock(time.perf_counter, lambda earlier, later: later - earlier)


def ours(pipe: Any, footprint: Footprint, asked: Request, size: int, *, cuda: bool, **how: int) -> Row:
    device = choose_device("cuda" if cuda else "cpu")
    plan = make_plan(footprint, machine_of(device), Budget(device=size))
    denoising = next(phase for phase in plan.forecast if phase.name == "denoise")
    said = {
        "told_peak": plan.predicted_peak(plan.device),
        "told_step": denoising.seconds / (asked.steps or STEPS),
        "placements": {name: part.described for name, part in plan.components.items()},
        "vae": plan.vae.described,
    }

    def way() -> Any:
        fit(pipe, plan=plan.model_copy(update={"request": None}), device=device, count_activations=False)
        return pipe

    return said | calls(pipe, way, asked, size, cuda=cuda, **how)


def rival(pipe: Any, name: str, asked: Request, size: int, *, tiles: bool, cuda: bool, **how: int) -> Row:
    if tiles:
        pipe.vae.enable_tiling()
    way = functools.partial(CONTENDERS[name], pipe, torch.device("cuda:0" if cuda else "cpu"))
    row = calls(pipe, way, asked, size, cuda=cuda, **how) | {"tiles": tiles}
    return row | ({"chosen": pipe.mm.applied_strategy} if hasattr(pipe, "mm") else {})


def rows_of(model: str, asked: Request, wishes: argparse.Namespace) -> list[Row]:
    dtype = torch.float32 if wishes.dry else torch.bfloat16
    footprint = measure_footprint(model, asked, dtype=str(dtype).removeprefix("torch."))
    pipe = build_known(known_model(model), dtype)
    pipe.set_progress_bar_config(disable=True)
    for network in find_components(pipe).values():
        fill_at_random(network)
    about = {"model": model, "request": asked.described, "steps": asked.steps}
    cuda, rows = not wishes.dry, []
    for size in wishes.budgets:
        for name in wishes.only:
            work = functools.partial(ours, pipe, footprint) if name == OURS else functools.partial(rival, pipe, name)
            tries: list[dict[str, Any]] = [{}] if name == OURS else [{"tiles": False}, {"tiles": True}]
            for how in tries:
                act = functools.partial(work, asked, size, cuda=cuda, **how)
                row = {**about, "contender": name, "budget": size, **forked(act, wishes.limit)}
                if row.get("failed") != "decoding":
                    break
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budgets", default="6,8,12,16,24", help="GiB")
    parser.add_argument("--only", default=",".join([OURS, *CONTENDERS]))
    parser.add_argument("--limit", type=float, default=300, help="seconds after which somebody is stopped")
    parser.add_argument("--dry", action="store_true")
    wishes = parser.parse_args()
    wishes.budgets, wishes.only = [int(size) * 2**30 for size in wishes.budgets.split(",")], wishes.only.split(",")
    models = wishes.models.split(",")
    if wishes.dry:
        models, wishes.budgets, wishes.only = ["sd-1.5"], [ROOM], [OURS, "all on the card"]
    torch.set_num_threads(1)  # here: a process with more threads than one cannot be forked safely
    rows: list[Row] = []
    if not wishes.dry:
        forked(lambda: {"rated": bool(measured_machine())}, wishes.limit)  # once, on a card that nobody uses
        file = RESULTS / f"{NAME}.json"
        written = json.loads(file.read_text())["rows"] if file.exists() else []
        rows = [row for row in written if row["model"] not in models or row["contender"] not in wishes.only]
    for model in models:
        for asked in [Request(**SMALL)] if wishes.dry else requests_of(model):
            rows += rows_of(model, asked, wishes)
            if not wishes.dry:
                write(NAME, {"rows": rows})


if __name__ == "__main__":
    main()
