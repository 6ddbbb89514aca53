"""One rank of a process group that runs tiny pipelines by context parallelism: what a test starts several times.

python -m context_ranks RANK SIZE STORE '[{"name": "Flux", "level": 0, "attention": "ring"}, …]' prints a line of JSON
for each trial: the largest error against one process, relative to the largest value; whether a second call gave the
same; and the report's notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

Trial = dict[str, Any]


def run_ranks(
    size: int, trials: Sequence[Trial], timeout: float = 600, module: str = "context_ranks", backend: str = "gloo",
    settings: Mapping[str, str] | None = None,
) -> list[list[Trial]]:  # fmt: skip
    """Run the trials of `module` on `size` ranks, and return what each rank printed.

    With a `backend` for cards, each rank has the card of its number. `settings` go into the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", module]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), f"{folder}/store", json.dumps(trials), backend],
                cwd=Path(__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(settings or {}), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, err)) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:  # shown by pytest if the test fails
            print(f"rank {number} ended with {rank.returncode}: {err[-3000:]}", file=sys.stderr)
    return [
        [json.loads(line) for line in out.splitlines() if line.startswith("{")] or [{"stderr": err}]
        for out, err in said
    ]


def main(tried: Callable[[int, Trial], Trial]) -> None:
    import torch.distributed as dist

    rank, size, store, trials = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    backend = sys.argv[5]
    with on_card(rank) if "cuda" in backend else contextlib.nullcontext():
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        for trial in trials:
            print(json.dumps(tried(rank, trial)), flush=True)
        dist.destroy_process_group()


@contextlib.contextmanager
def on_card(rank: int) -> Iterator[None]:
    """With that card, exact float32, and numbers where it is one of the stub."""
    import torch

    from cuda_stub import driver
    from cuda_stub.compute import computing

    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    with computing() if driver.loaded() else contextlib.nullcontext():
        yield


def tried(rank: int, trial: Trial) -> Trial:
    import torch
    import torch.distributed as dist

    import tightfit
    from pipeline_classes import cases
    from tightfit.run import context_parallel
    from tiny_pipelines import run

    case = cases()[trial["name"]]
    if trial.get("exact"):
        case = dataclasses.replace(case, make=lambda make=case.make: make().to(torch.float64))
    unknown = mock.patch.object(context_parallel, "doubled_of", return_value={})
    expected = run(case.make(), case)
    pipe = case.make()
    if "dtype" in trial:
        pipe = pipe.to(getattr(torch, trial["dtype"]))
    parallel = {"context": dist.get_world_size(), "attention": trial.get("attention", "auto")}
    asked = case.call()
    request = {ours: asked[name] for ours, name in NAMES.items() if name in asked}
    request |= {"height": trial["tall"]} if "tall" in trial else {}
    within = {name: trial[name] for name in ("level", "budget", "plan") if name in trial}
    try:
        with unknown if trial.get("unknown") else contextlib.nullcontext():  # which inputs grow with the height
            fitted = tightfit.fit(pipe, **within, device=device_of(rank, trial), request=request, parallel=parallel)
    except tightfit.TightfitError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    others = {
        "tall": lambda: tall(pipe, case, trial, fitted),
        "dtype": lambda: {"ratio": ratio_of_errors(pipe, case)},
        "unseeded": lambda: {"sum": unseeded(rank, pipe, asked)},
    }
    if other := next((name for name in others if name in trial), None):
        return others[other]()
    if trial.get("other_network") == rank:
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    if trial.get("killed") == rank:

        def end(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        asked["callback_on_step_end"] = end
    if "fails" in trial:  # a rank's callback, and its process lives on
        return failed(rank, trial, pipe, asked) | {"apart": apart(run(pipe, case), expected)}
    began = time.time()
    try:
        found = pipe(**asked)[0].float().cpu()
    except tightfit.TightfitError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.time() - began}
    if "kept" in trial:
        torch.save(found, f"{trial['kept']}-{rank}.pt")
    again = run(pipe, case)
    if trial.get("changed"):  # a setting of the network, as adapters' scales are
        return {
            "apart": apart(found := rescaled(pipe, case), rescaled(case.make(), case)),
            "change": apart(found, expected),
        }
    report = fitted.report()
    decoded = decoded_apart(pipe, case.make(), trial["decodes"]) if "decodes" in trial else 0.0
    height = trial.get("other_height", 0)
    other = run(pipe, case, height).cpu() if height else None
    fitted.undo()
    return {
        "apart": apart(found, expected),
        "other": 0.0 if other is None else apart(other, run(case.make(), case, height)),
        "decoded": decoded,
        "same": torch.equal(found, again.cpu()),
        "undone": torch.equal(run(pipe, case), expected),
        "counts": counts(),
        "notes": list(report.trace.notes),
        "plan": str(report.plan),
        "predicted": report.plan.predicted_peak(report.plan.device),
        "peak": max(phase.peak_bytes for phase in report.trace.phases),
    }


def counts() -> dict[str, int]:
    from cuda_stub import driver

    return {name: driver.count(name) for name in ("races", "hazards", "nccl_calls", "nccl_bytes")}


def device_of(rank: int, trial: Trial) -> str:
    device = str(trial.get("device", "loopback"))
    return f"cuda:{rank}" if device == "cuda" else device


def apart(found: Any, expected: Any) -> float:
    return float((found.float().cpu() - expected.cpu()).abs().max() / expected.abs().max())


def decoded_apart(pipe: Any, whole: Any, items: int) -> float:
    """How far a batch of latents that are decoded on all ranks, given by keyword, is from what one process decodes."""
    import torch

    latents = torch.randn((items, 4, 8, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return apart(pipe.vae.decode(z=latents.to(pipe.device)).sample, whole.vae.decode(latents).sample)


def tall(pipe: Any, case: Any, trial: Trial, fitted: Any) -> Trial:
    """A picture of that height under the plan for it, beside what the ranks draw with enough memory."""
    import torch.distributed as dist

    import tightfit
    from tiny_pipelines import run

    found = run(pipe, case, trial["tall"]).cpu()
    report = fitted.report()
    fitted.undo()
    parallel = {"context": dist.get_world_size(), "attention": trial["attention"]}
    tightfit.fit(pipe, level=0, device=str(report.plan.device), parallel=parallel)
    return {
        "apart": apart(found, run(pipe, case, trial["tall"])),
        "vae": report.plan.vae.to_mapping(),
        "plan": str(report.plan),
        "predicted": report.plan.predicted_peak(report.plan.device),
        "peak": max(phase.peak_bytes for phase in report.trace.phases),
    }


def unseeded(rank: int, pipe: Any, asked: dict[str, Any]) -> float:
    """The sum of what is drawn without a generator, after another seed on each rank."""
    import torch

    torch.manual_seed(rank)
    return float(pipe(**asked | {"generator": None})[0].double().sum())


def ratio_of_errors(pipe: Any, case: Any) -> float:
    """How many times as far from float32 as one process's pictures the ranks' are, the same weights given."""
    import torch

    from half_precision import error_ratio, is_sure, squares_of_error

    whole = case.make().to(pipe.dtype)
    exact = case.make().to(pipe.dtype).to(torch.float32)
    own, others = torch.zeros(0), torch.zeros(0)
    for seed in range(1, MOST_INPUTS + 1):
        found, alone, right = (
            each(**case.call() | {"generator": torch.Generator().manual_seed(seed)})[0].float().cpu()
            for each in (pipe, whole, exact)
        )
        own = torch.cat((own, squares_of_error(found, right)))
        others = torch.cat((others, squares_of_error(alone, right)))
        if is_sure(ratio := error_ratio(own, others)):
            break
    return ratio[0]


def rescaled(pipe: Any, case: Any) -> Any:
    """What is drawn with another `output_scale_factor`, a plain attribute of the network's blocks."""
    from tiny_pipelines import run

    blocks = [block for block in pipe.unet.modules() if hasattr(block, "output_scale_factor")]
    for block in blocks:
        block.output_scale_factor *= 2
    return run(pipe, case)


def failed(rank: int, trial: Trial, pipe: Any, asked: dict[str, Any]) -> Trial:
    """A call that fails on one rank: how it ended here, and when; the error is still held for a while."""

    def fail(*_: Any) -> Any:
        raise ArithmeticError("of the user's own")

    try:
        pipe(**asked | ({"callback_on_step_end": fail} if trial["fails"] == rank else {}))
    except Exception as error:
        ended = time.time()
        time.sleep(HELD)
        return {"error": f"{type(error).__name__}: {error}", "ended": ended}
    return {}


HELD = 20  # seconds
MOST_INPUTS = 30
NAMES = {"height": "height", "width": "width", "frames": "num_frames"}

if __name__ == "__main__":
    main(tried)
