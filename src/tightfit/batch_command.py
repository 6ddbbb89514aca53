"""The command for many requests, which `cli` registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

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
from tightfit.run.batch_lines import LineDefaults, read_lines
from tightfit.run.limits import limits_of
from tightfit.run.plan_options import call_request, plan_fields
from tightfit.terminal import errors_as_lines, log_to_stderr, quiet_transformers, say, showing_steps

__all__ = ["BATCH_EXAMPLES", "batch"]

BATCH_EXAMPLES = """Draw a file of requests, in one process or on the machines of a Ray cluster.

Examples:

  tightfit batch prompts.jsonl --out pictures
  tightfit batch ./sdxl prompts.jsonl --out pictures --budget 8GB --steps 30
  tightfit batch ./sdxl prompts.jsonl --out pictures --budget 8GB --ray
  tightfit batch ./sdxl prompts.jsonl --out pictures --budget 8GB --ray-address auto

A line of PROMPTS is a prompt in quotes, or a JSON object with prompt,
negative_prompt, seed, name (of the file), height, width, frames, batch, steps,
guidance, and arguments (others of the pipeline's call); options are for lines
that do not say it. All lines are checked before anything is loaded. DIR gets
the pictures, and results.jsonl with a record of each request. The same command
again draws only what is not done, or failed. A file that the batch did not
write is never replaced. Exit code 1: some requests failed.
"""


def batch(
    words: Annotated[
        list[str], typer.Argument(metavar="[MODEL] PROMPTS", help="The file of requests, and with what to draw them.")
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for pictures and records.")],
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
    seed: Annotated[int | None, typer.Option(help="For all lines without one. Default: one for each prompt.")] = None,
    batch: Batch = 1,
    negative: Negative = None,
    device: Where = None,
    dtype: Dtype = None,
    ray: Annotated[bool, typer.Option("--ray", help="Draw with Ray; without an address: on this one.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="The cluster, as ray.init takes it: auto, HOST:PORT.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log one line per call and request.")] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        if len(words) > 2:
            raise InputError(f"batch takes [MODEL] PROMPTS, not {len(words)} words: {words[0]} …")
        choices = plan_fields(plan, level, set_ or [])
        limits = limits_of(budget, ram, allow or [], choices, cache, quality)
        request = call_request(
            choices, height=height, width=width, frames=frames, steps=steps, guidance=guidance, batch=batch
        )
        defaults, prompts = LineDefaults(request, negative, seed), Path(words[-1])
        read_lines(prompts, defaults)  # before the imports, which take seconds
        with say("starting"):
            from tightfit.run.batch import BatchJob, DrawRequests, draw_here
            from tightfit.run.run_target import RunOptions

            draw: DrawRequests = draw_here
            if ray or ray_address is not None:
                from tightfit.run.batch_ray import RayCluster

                draw = RayCluster(ray_address).draw
        options = RunOptions(choices, limits, device, dtype)
        job = BatchJob(prompts, out, defaults, options, words[0] if len(words) == 2 else None)
        with log_to_stderr(verbose), quiet_transformers():
            with say("checking"):
                job.prepare()
            with showing_steps() as on_progress:
                report = job.run(draw, on_progress)
        typer.echo(str(report))
        if as_json:
            typer.echo(json.dumps(report.to_mapping()))
    if report.failures:
        raise typer.Exit(1)
