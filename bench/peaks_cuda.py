"""Peaks of whole calls by torch's own CUDA allocator on a stand-in for the CUDA runtime, beside what is predicted.

Known models at full size. Weights are memory that nobody touches, kernels compute small tensors only (which pipelines
look at: time steps, masks), and the allocator, its streams and its limits are torch's own, so a row takes seconds and
needs no card. What a convolution's workspace takes is the
stand-in's: as many bytes as are assumed ("copies"), none, or twice as many.

    tests/cuda_stub/run.sh python bench/peaks_cuda.py                        all rows that are not there yet
    tests/cuda_stub/run.sh python bench/peaks_cuda.py sdxl flux.1-dev        those of some models
    tests/cuda_stub/run.sh python bench/peaks_cuda.py --again sdxl           though they are there

Each row runs in a process of its own. Writes bench/results/peaks-cuda.json after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from cuda_stub.compute import Compute
from measuring import RESULTS
from tightfit import fit
from tightfit.catalog.known import known_card, known_model, model_names
from tightfit.errors import TightfitError
from tightfit.files import replacing
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments, dummy_inputs
from tightfit.run.simulate import simulate_call
from tightfit.schema.request import Request

GB = 10**9
FILE = RESULTS / "peaks-cuda.json"
FIRST = ("sdxl", "flux.1-dev", "sd3.5-large", "qwen-image", "cogvideox-5b", "wan-2.1-14b")
LEVELS = (0, 1, 2, 3)
CARDS = (6, 8, 12, 16, 24, 48, 80)  # GB
WORKSPACES = ("copies", "0", "twice")
ENDLESS = 512  # GB
SHARE = 0.9  # of a card, as a budget
LIMIT = 900  # seconds for a row
SMALL, SMALL_WHOLE = 64 * 2**10, 8 * 2**20  # bytes up to which tensors are computed; of integers and truth values


@dataclass(frozen=True)
class Row:
    """One call: of a model, at a level on a card without end or within a budget on a card of `card` GB."""

    model: str
    workspace: str
    level: int | None = None
    card: int = ENDLESS

    @property
    def title(self) -> str:
        how = f"budget {self.budget / GB:.1f} GB" if self.level is None else f"level {self.level}"
        return f"{self.model}, {how}, workspace {self.workspace}"

    @property
    def budget(self) -> int:
        return round(self.card * GB * SHARE)


def rows_of(models: Iterable[str]) -> Iterator[Row]:
    for model in models:
        for workspace in WORKSPACES:
            yield from (Row(model, workspace, level=level) for level in LEVELS)
            yield from (Row(model, workspace, card=card) for card in CARDS)


# one row, in a process of its own


def without_numbers() -> None:
    """Nothing that would touch a weight's pages."""
    usual: Callable[..., torch.Tensor] = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        on_host = self.device.type == source.device.type == "cpu"
        return self if on_host and self.nbytes > 2**20 else usual(self, source, non_blocking)

    torch.Tensor.copy_ = copy_  # type: ignore[method-assign,assignment]


def without_modes_for_large_products() -> None:
    """A linear layer adds its bias in place, but not while a dispatch mode is active, as the one that computes is."""

    def alone(usual: Callable[..., Any]) -> Callable[..., Any]:
        def linear(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if tensor.nbytes <= SMALL or tensor.device.type != "cuda":
                return usual(tensor, *rest, **options)
            with _disable_current_modes():
                return usual(tensor, *rest, **options)

        return linear

    F.linear = alone(F.linear)  # type: ignore[assignment]
    op = torch.ops.aten.linear.default  # of exported networks
    op._op = alone(op._op)


def give_weights(network: nn.Module) -> None:
    """`network` with memory that nobody touches in place of what is on "meta"; what is shared stays shared."""
    made: dict[int, torch.Tensor] = {}
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):  # torch's matmul asks whether it wants gradients
                        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fresh
                tensors[name] = made[id(tensor)]


def request_of(model: str) -> Request:
    return known_model(model).request.model_copy(update={"steps": 2})


def measured(row: Row) -> tuple[Any, Any, Any]:
    """The pipeline's plan, the trace of one call, and the error that ended it, if any."""
    pipe = build_known(known_model(row.model))
    for network in find_components(pipe).values():
        give_weights(network)
    pipe.set_progress_bar_config(disable=True)
    asked = request_of(row.model)
    wish: dict[str, Any] = {"budget": row.budget} if row.level is None else {"level": row.level}
    fitted = fit(pipe, device="cuda", request=asked, **wish)
    pictures, left = dummy_inputs(pipe, asked, {})
    torch.cuda.reset_peak_memory_stats()
    failed: BaseException | None = None
    try:
        with torch.no_grad(), Compute(most=SMALL, most_whole=SMALL_WHOLE):
            pipe(**call_arguments(pipe, Prompt("a prompt", seed=0), left) | pictures | {"output_type": "pt"})
    except (RuntimeError, TightfitError) as error:
        failed = error
    try:
        trace = fitted.report().trace
    except TightfitError:  # it failed before any component was at work
        raise failed or RuntimeError("nothing was measured") from None
    return fitted.plan, trace, failed


def compare(row: Row) -> dict[str, Any]:
    started = time.perf_counter()
    without_numbers()
    without_modes_for_large_products()
    plan, trace, failed = measured(row)
    counted = torch.cuda.memory_stats()
    found: dict[str, Any] = asdict(row) | {
        "title": row.title,
        "budget": row.budget if row.level is None else None,
        "allocated": counted["allocated_bytes.all.peak"],
        "reserved": counted["reserved_bytes.all.peak"],
        "retries": counted["num_alloc_retries"],
        "ran_out": counted["num_ooms"],
        "failed": f"{type(failed).__name__}: {str(failed)[:300]}" if failed else None,
        "notes": list(trace.notes) if hasattr(trace, "notes") else [],
    }
    card = known_card("rtx4090").model_copy(update={"bytes": row.card * GB})
    choices = {"level": row.level} if row.level is not None else plan.to_mapping()
    told = simulate_call(row.model, card, choices, request_of(row.model)).trace
    forecast = {phase.name: phase.peak_bytes for phase in plan.forecast}
    found["phases"] = [
        {
            "name": real.name,
            "allocated": [real.peak_bytes, mine.peak_bytes],
            "reserved": [real.peak_reserved, mine.peak_reserved],
            "forecast": forecast.get(real.name),
        }
        for real, mine in zip(trace.phases, told.phases, strict=failed is None)
    ]
    return found | {"seconds": round(time.perf_counter() - started, 1)}


# all of them


def run(row: Row) -> dict[str, Any]:
    return _run(row) | {"commit": commit()}


def commit() -> str:
    """What the code is of that a row was measured with."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=RESULTS).strip()


def _run(row: Row) -> dict[str, Any]:
    settings = {
        "STUB_TOTAL": str(row.card * GB),
        "STUB_COPY": "0",
        "STUB_COPY_MAX": str(SMALL),
        "STUB_RACES": "0",
        "STUB_CUDNN_WORKSPACE": row.workspace,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, "--only", json.dumps(asdict(row))]
    try:
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return asdict(row) | {"title": row.title, "refused": f"took more than {LIMIT} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return asdict(row) | {"title": row.title, "refused": last[:500]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def words(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"{found['title']}: {found['refused']}"
    off = [
        f"{phase['name']} {phase['allocated'][1] - phase['allocated'][0]:+} B, "
        f"{phase['reserved'][1] / max(phase['reserved'][0], 1) - 1:+.2%}"
        for phase in found["phases"]
    ]
    over = found["budget"] is not None and found["reserved"] > found["budget"]
    ends = [f"{found['retries']} retries"] * bool(found["retries"]) + ["ABOVE THE BUDGET"] * over
    return f"{found['title']}: {'; '.join([*off, *ends, *filter(None, [found['failed']])])} ({found['seconds']} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--workspace", choices=WORKSPACES)
    parser.add_argument("--levels", action="store_true", help="no budgets")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(compare(Row(**json.loads(asked.only)))))
        return
    every = [*FIRST, *(name for name in model_names() if name not in FIRST)]
    kept = {each["title"]: each for each in json.loads(FILE.read_text())["rows"]} if FILE.exists() else {}
    titles = [row.title for row in rows_of(every)]
    for row in rows_of(asked.models or every):
        if (row.title in kept and not asked.again) or (asked.workspace or row.workspace) != row.workspace:
            continue
        if asked.levels and row.level is None:
            continue
        kept[row.title] = run(row)
        print(words(kept[row.title]), flush=True)
        rows = [kept[title] for title in titles if title in kept]
        with replacing(FILE) as partial:
            partial.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
