"""The command that tries step caches on a model, which `cli` registers."""

from __future__ import annotations

from typing import Annotated

import typer

from tightfit.command_options import AsJson, Dtype, Frames, Guidance, Negative, Pixels, Ram, Steps, Where, Within
from tightfit.run.limits import limits_of
from tightfit.run.plan_options import call_request, demo_request
from tightfit.terminal import errors_as_lines, quiet_transformers, say

__all__ = ["CALIBRATE_EXAMPLES", "calibrate"]

CALIBRATE_EXAMPLES = """Try step caches on a model, for --allow step-cache to choose by.

Examples:

  tightfit calibrate
  tightfit calibrate ./flux --steps 28 --budget 8GB
  tightfit calibrate ./sdxl --prompt "a lighthouse" --prompt "a fox" --strategy static
  tightfit run ./flux "a lighthouse" --budget 8GB --allow step-cache --quality 35

Each prompt is drawn without a step cache, and then with several settings of
each strategy, about 30 times in all. How much the pictures change, which steps
are skipped and how long it takes is kept beside other measurements, and holds
for the same weights and about as many steps. Give prompts of the kind that is
to be drawn, and the size and the steps that are to be used.
"""
PROMPTS = ("a red bicycle that leans against a stone wall", "a harbour at dusk, watercolour")
DEMO_PROMPTS = ("a large red circle on the left and a small blue square on the right", "a green triangle at the top")


def calibrate(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder or a hub id.")] = None,
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="What to draw; may be repeated. Default: two.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="A kind of step cache to try; may be repeated. Default: all.")
    ] = None,
    budget: Within = None,
    ram: Ram = None,
    height: Pixels = None,
    width: Pixels = None,
    frames: Frames = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    device: Where = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        limits_of(budget, ram, [], {})
        request = call_request({}, height=height, width=width, frames=frames, steps=steps, guidance=guidance)
        request = demo_request(request) if model is None else request
        prompts = prompt or list(PROMPTS if model is not None else DEMO_PROMPTS)
        with say("starting"):
            from tightfit.report.calibration import calibration_text
            from tightfit.run.cache_trials import calibrate_model
        with quiet_transformers(), say("calibrating"):
            found = calibrate_model(
                model, prompts, request, negative, strategies=strategy, budget=budget, ram=ram, device=device,
                dtype=dtype,
            )  # fmt: skip
        typer.echo(calibration_text(found))
        if as_json:
            typer.echo(found.to_json())
