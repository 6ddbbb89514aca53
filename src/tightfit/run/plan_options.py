"""Options of the command line and of `fit` → Plan fields and a Request; help texts. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.errors import PlanError, RequestError
from tightfit.run.plan_changes import parse_change, set_fields
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request

__all__ = [
    "CHART_EXAMPLES",
    "EXAMPLES",
    "MACHINE_EXAMPLES",
    "PLAN_EXAMPLES",
    "RUN_EXAMPLES",
    "call_request",
    "check_steps",
    "demo_request",
    "plan_fields",
    "request_to_plan",
]


MOST_STEPS = 10_000  # schedulers make tables of as many numbers, some of them gigabytes for a billion
DEMO_DEFAULTS = {"steps": 20, "guidance": 2.5}


def plan_fields(plan: Path | None, level: int | None, changes: list[str]) -> dict[str, Any]:
    """Return Plan fields from a file, --level and --set; later ones override earlier. PlanError for invalid ones."""
    choices: dict[str, Any] = Plan.fields_from_file(plan) if plan is not None else {}
    if level is not None:
        if choices.get("reasons") and choices.get("level") != level:
            raise PlanError(
                f"{plan} is a complete plan (level {choices.get('level')}): --level {level} would change its name "
                "and nothing else. Leave one of them out, or change single fields with --set"
            )
        choices["level"] = level
    set_fields(choices, [parse_change(change) for change in changes])
    return choices


def request_to_plan(request: Request | Mapping[str, Any] | None, example: Mapping[str, Any] | None) -> Request | None:
    """Return the request to plan for; None if there is none, or an `example` instead. PlanError for both."""
    if request is not None and example is not None:
        raise PlanError(f"give request={request} or example={list(example)}, the arguments of a call: not both")
    return request if isinstance(request, Request | None) else Request.from_mapping(request)


def call_request(choices: dict[str, Any], negative: str | None = None, **fields: Any) -> Request:
    """Return the request of the options, merged over the plan's own `request`, which is removed from `choices`."""
    given = choices.pop("request", None) or {}
    options = {field: value for field, value in fields.items() if value is not None}
    if options.get("batch") == 1:
        del options["batch"]  # the default: does not override
    request = Request.from_mapping(given | options if isinstance(given, dict) else given)
    check_steps(request)
    if negative is None:
        return request
    return request.model_copy(update={"arguments": request.arguments | {"negative_prompt": "text"}})


def check_steps(request: Request) -> None:
    """Raise RequestError for more than MOST_STEPS steps."""
    if (request.steps or 0) > MOST_STEPS:
        raise RequestError(f"{request.steps} steps are too many: {MOST_STEPS:,} at the most", steps=request.steps)


def demo_request(request: Request) -> Request:
    """Return `request` with the demo model's defaults: diffusers' usual 50 steps at guidance 7.5 do not suit it."""
    return Request(**{**DEMO_DEFAULTS, **{name: value for name, value in request if value is not None}})


EXAMPLES = """Any diffusers pipeline, any memory budget, the same pictures.

Examples:

  tightfit run "a red circle on the left"
  tightfit run ./sdxl "an astronaut riding a horse" --budget 8GB

tightfit COMMAND --help says more.
"""

RUN_EXAMPLES = """Generate pictures.

Examples:

  tightfit run "a red circle on the left and a small blue square on the right"
  tightfit run ./sdxl "an astronaut riding a horse" --level 3 --out horse.png
  tightfit run ./flux "a lighthouse" --budget 8GB --ram 16GB
  tightfit run ./flux "a lighthouse" --budget cuda:0=10GB,cuda:1=8GB
  tightfit run ./flux "a lighthouse" --level 2 --set vae.tile=256
  tightfit run "a green triangle at the top" --level 3 --timeline memory.png

MODEL is a diffusers folder or a hub id. Left out, it is the demo model that
ships with tightfit.
"""

PLAN_EXAMPLES = """Say what would happen, without weights and without the card.

Examples:

  tightfit plan flux.1-dev --card rtx4090 --budget 8GB
  tightfit plan flux.1-dev --card rtx4090 --level 3
  tightfit plan sdxl --card rtx3060,rtx4060 --budget rtx3060=6GB,rtx4060=4GB
  tightfit plan sdxl --card rtx3060 --level 1 --height 1024 --width 1024
  tightfit plan wan-2.1-14b --card a100-80gb --frames 81 --json
  tightfit plan flux.1-dev --card rtx3060 --level 3 --timeline memory.png
  tightfit plan sdxl --card rtx3060 --budget 6GB --backward lora:16
  tightfit plan wan-2.1-14b --card rtx4090 --cards-per-node 4 --budget 12GB
  tightfit plan wan-2.1-14b --card h100 --cards-per-node 8 --nodes 2 --link 400Gbit

MODEL is a known model, a diffusers folder or a hub id (only its small files
and the headers of its weights are read); left out, the demo model. CARD is a
known card, or several with commas between; left out, this computer, measured
once (tightfit machine). A wrong name is answered with those near it. With
--backward, a backward pass follows each denoiser call: for a LoRA (of rank 4,
or lora:RANK), for all parameters, or for the inputs, as guidance by gradients
needs it. With --cards-per-node and --nodes, cards of one kind share the rows
of each operation, as under torchrun; times, bytes and budget are of each card.
Exit code 3: it does not fit.
"""

MACHINE_EXAMPLES = """Say what this computer has, and measure what it reaches.

Examples:

  tightfit machine
  tightfit machine --refresh
  tightfit machine --json

Memory is what is free now. Rates are measured once, in less than 20 s, and
kept; --refresh measures them anew. What runs with a budget took corrects the next
plan for the same; --refresh forgets that, too.
"""

CHART_EXAMPLES = """Say what known models do on known cards: level, time, peak, largest.

Examples:

  tightfit chart --models sd-1.5,flux.1-dev --cards rtx4060,rtx4090
  tightfit chart --models sdxl --ram 16GB
  tightfit chart --models sdxl,ltx-video-2b --out chart.png
  tightfit chart --level-table wan2.1-14b --cards rtx4090

What a model does is measured once, in seconds to minutes for each size, and
kept: another card is a matter of seconds, and an interrupted chart goes on
where it was. All known models may take hours the first time. Time and peak
are those of the plan that tightfit makes for the card, which is lossless.
Neither weights nor cards are needed.
"""
