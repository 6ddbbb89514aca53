"""The command that draws with lossy techniques and without, which `cli` registers."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.command_options import (
    Allow,
    AsJson,
    Batch,
    Cache,
    Changes,
    Dtype,
    Frames,
    Guidance,
    Level,
    Negative,
    Pixels,
    PlanFile,
    Quality,
    Ram,
    Steps,
    Where,
    Within,
)
from tightfit.errors import InputError
from tightfit.run.launched_ranks import rank_here
from tightfit.run.limits import limits_of
from tightfit.run.plan_options import call_request, plan_fields
from tightfit.terminal import errors_as_lines, log_to_stderr, quiet_transformers, say, showing_steps

if TYPE_CHECKING:
    from tightfit.report.comparison import Comparison
    from tightfit.run.comparison import ComparisonJob

__all__ = ["COMPARE_EXAMPLES", "compare"]

COMPARE_EXAMPLES = """Draw with lossy techniques and without, and measure the difference.

Examples:

  tightfit compare "a red circle on the left" --cache static
  tightfit compare ./flux "a lighthouse" --budget 8GB --cache first-block
  tightfit compare ./sdxl "a lighthouse" --batch 4 --cache static,interval=3
  tightfit compare ./sdxl "a lighthouse" --set components.unet.storage=int8

Options are those of run, and at least one of them must be lossy. The same
prompt and seed are drawn twice in one process: with the options, then without
what is lossy in them, each time with the model loaded anew. What is printed
are the seconds of the calls (without loading), their peaks, the skipped steps,
and PSNR and SSIM of each picture; of a video, their mean over its frames. The
file has the pictures side by side, and their difference. If a budget is too
small without the lossy techniques, the second call has all free memory.
"""


def compare(
    words: Annotated[list[str], typer.Argument(metavar="[MODEL] PROMPT", help="What to draw, and with what.")],
    *,
    budget: Within = None,
    ram: Ram = None,
    allow: Allow = None,
    cache: Cache = None,
    quality: Quality = None,
    level: Level = None,
    plan: PlanFile = None,
    set_: Changes = None,
    height: Pixels = None,
    width: Pixels = None,
    frames: Frames = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Annotated[int | None, typer.Option(help="Of both calls. Default: random.")] = None,
    batch: Batch = 1,
    negative: Negative = None,
    device: Where = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="PNG file or folder. Default: named after the prompt.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log one line per call.")] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        if len(words) > 2:
            raise InputError(f"compare takes [MODEL] PROMPT, not {len(words)} words: put the prompt in quotes")
        if (ranks := rank_here().size) > 1:
            raise InputError(f"compare draws in one process, not on {ranks} ranks: start it without torchrun")
        choices = plan_fields(plan, level, set_ or [])
        limits = limits_of(budget, ram, allow or [], choices, cache, quality)
        request = call_request(
            choices, negative, height=height, width=width, frames=frames, steps=steps, guidance=guidance, batch=batch
        )
        with say("starting"):
            from tightfit.run.comparison import CALLS, ComparisonJob  # imports torch and diffusers, which takes seconds
            from tightfit.run.prompt import Prompt
            from tightfit.run.run_target import RunOptions

        job = ComparisonJob(
            Prompt(words[-1], random.randrange(2**32) if seed is None else seed, negative),
            request,
            RunOptions(choices, limits, device, dtype),
            model=words[0] if len(words) == 2 else None,
            out=out,
        )
        with log_to_stderr(verbose), quiet_transformers():
            comparison = _work(job, CALLS)
        typer.echo(str(comparison))
        typer.echo(f"wrote {job.written}")
        if as_json:
            typer.echo(json.dumps(comparison.to_mapping() | {"seed": job.prompt.seed, "outputs": [str(job.written)]}))


def _work(job: ComparisonJob, calls: tuple[str, ...]) -> Comparison:
    job.prepare()
    for warning in job.warnings():
        typer.secho(warning, err=True, fg="yellow")
    with say("planning"):
        job.plan()
    for number, call in enumerate(calls, 1):
        with say(f"loading for call {number} of {len(calls)}, {call}"):
            job.load(call)
        with showing_steps() as on_progress:
            job.draw(call, partial(on_progress, f"call {number} of {len(calls)}, {call}"))
    with say("comparing"):
        return job.finish()
