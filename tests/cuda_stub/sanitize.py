"""torch's own race detector (torch.cuda._sanitizer) on tiny pipelines.

python -m cuda_stub.sanitize CASE [--plan NAME ...] [--without TEXT], on the stub's card or on a real one.
It compares the addresses of tensors with what streams have waited for, and knows nothing of the stub. A line of JSON
for each plan. `--without TEXT` leaves out the ordering in whose name TEXT is: then it should have something to report.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _sanitizer

import tightfit
from cuda_stub import driver
from cuda_stub.compute import computing
from cuda_stub.orderings import all_orderings, leave_out
from cuda_stub.plugin import rates_without_numbers
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import request_of
from tiny_pipelines import CASES, run

STREAMED = {"placement": "stream"}
PLANS: dict[str, Any] = {
    "level 0": {"plan": {"level": 0}},
    "level 3": {"plan": {"level": 3}},
    "waiting activations": {"plan": {"level": 0, "offload_activations": True}},
    "strips": {"plan": {"vae": {"strips": 30_000, "feature_maps": "host"}}},
    "page-locked": STREAMED | {"pinned": True},
    "not page-locked": STREAMED | {"pinned": False},
    "on disk": STREAMED | {"offload_to": "disk"},
    "budget": {"budget": 2**29},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--plan", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--without")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.cuda.init()
    case = next(case for case in CASES if case.name == options.case)
    run(case.make(), case)  # whatever is imported by the first call
    if options.without:
        leave_out(next(each for each in all_orderings() if options.without in str(each)))
    _sanitizer.traceback = SimpleNamespace(StackSummary=traceback.StackSummary, walk_stack=_nearest)
    _sanitizer.enable_cuda_sanitizer()
    with _computing():
        for name in options.plan:
            print(json.dumps({"case": case.name, "plan": name, **_reports(case, PLANS[name])}), flush=True)


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """With numbers on the stub's card; a real card has its own."""
    with contextlib.ExitStack() as stack:
        if driver.loaded():
            stack.enter_context(computing())
            stack.enter_context(rates_without_numbers())
        yield


def _nearest(frame: Any) -> Iterator[Any]:
    """The frames that a report shows: it remembers those of each operation, which is most of its time."""
    return itertools.islice(traceback.walk_stack(frame), 12)


def _reports(case: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Whether it reported anything in `fit`, two calls and `undo`; the first report ends them."""
    pipe = case.make()
    if "placement" in chosen:
        chosen = {"plan": {"components": dict.fromkeys(find_components(pipe), chosen)}}
    if "budget" in chosen:
        chosen = chosen | {"request": request_of(pipe, (), case.call())}
    with contextlib.redirect_stderr(io.StringIO()):  # it prints what it raises
        try:
            fitted = tightfit.fit(pipe, **chosen, device="cuda")
            made = [run(pipe, case).cpu() for _ in range(2)]
            fitted.undo()
        except _sanitizer.CUDASanitizerErrors as error:
            return {"reports": len(error.errors), "first": str(error.errors[0])[:2000]}
    return {"reports": 0, "same": torch.equal(*made)}


if __name__ == "__main__":
    main()
