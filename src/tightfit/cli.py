"""The command line: each command composes the stages. Errors are one line, never a traceback."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from tightfit.errors import InputError, PlanError, TightfitError
from tightfit.records import Plan, Request

if TYPE_CHECKING:
    from tightfit.run.job import Job

app = typer.Typer(
    help="Any diffusers pipeline, any memory budget, the same pictures.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RUN_EXAMPLES = """Generate pictures.

Examples:

  tightfit run "a red circle on the left and a small blue square on the right"

  tightfit run ./sdxl "an astronaut riding a horse" --level 3 --steps 30 --out horse.png

  tightfit run ./flux "a lighthouse" --set vae.tile=256 --set components.vae.placement=resident

  tightfit run "a green triangle at the top" --device loopback --level 3 --timeline memory.png

MODEL is a diffusers folder or a hub id; left out, it is the small demo model that ships with tightfit.
"""


@app.callback()
def main() -> None:
    """Any diffusers pipeline, any memory budget, the same pictures."""


@app.command(help=RUN_EXAMPLES)
def run(
    words: Annotated[list[str], typer.Argument(metavar="[MODEL] PROMPT", help="What to draw, and with what.")],
    level: Annotated[int | None, typer.Option(help="0 all on the device … 3 the least memory. Default: 0.")] = None,
    plan: Annotated[Path | None, typer.Option(help="YAML or JSON file of plan fields.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="One plan field, dotted.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How strongly the prompt steers.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same pictures. Default: a random one.")] = None,
    batch: Annotated[int, typer.Option(help="Pictures of the same prompt.")] = 1,
    negative: Annotated[str | None, typer.Option(help="What to keep away from.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or loopback. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    out: Annotated[Path | None, typer.Option(help="PNG file or existing folder. Default: named after the prompt.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw where the memory went, as PNG or SVG.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show bytes and phase while it runs.")] = False,
    snapshot: Annotated[Path | None, typer.Option(help="CUDA: allocator history for pytorch.org/memory_viz.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went, by operation.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log one line per call.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout: one JSON object.")] = False,
) -> None:
    with _errors_as_lines(as_json):
        if len(words) > 2:
            raise InputError(f"run takes [MODEL] PROMPT, not {len(words)} words: put the prompt in quotes")
        if verbose:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
        request = Request(height=height, width=width, frames=frames, steps=steps, guidance=guidance, batch=batch)
        with _say("starting"):
            from tightfit.run.job import Job  # brings torch and diffusers, which takes seconds
        from tightfit.run.request import Prompt

        job = Job(
            prompt=Prompt(words[-1], random.randrange(2**32) if seed is None else seed, negative),
            request=request,
            choices=_choices(plan, level, set_ or []),
            model=words[0] if len(words) == 2 else None,
            device=device,
            dtype=dtype,
            out=out,
            timeline=timeline,
            snapshot=snapshot,
        )
        _work(job, watch=watch, profile=profile, as_json=as_json)


def _choices(plan: Path | None, level: int | None, changes: list[str]) -> dict[str, Any]:
    """Plan fields from a file, then --level, then --set, each over the one before."""
    choices: dict[str, Any] = Plan.fields_from_file(plan) if plan is not None else {}
    if level is not None:
        choices["level"] = level
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals or not all(field.split(".")):
            raise PlanError(f"--set {change!r} is not FIELD=VALUE, e.g. --set vae.tile=256")
        _set(choices, field.split("."), _value(change, text))
    return choices


def _value(change: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise PlanError(f"--set {change!r}: the value is not YAML") from None


def _set(fields: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise PlanError(f"--set {'.'.join(path)}: {name} has no fields inside")
    fields[path[-1]] = value


def _work(job: Job, *, watch: bool, profile: bool, as_json: bool) -> None:
    from tightfit.run.progress import showing_progress

    job.prepare()
    for warning in job.warnings():
        typer.secho(warning, err=True, fg="yellow")
    with _say("loading"):
        job.load()
    with showing_progress(job.fitted, watch=watch) as progress:
        table = job.run(progress, profile=profile)
    if table:
        typer.echo(table)
    typer.echo(str(job.report))
    for path in job.written:
        typer.echo(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps(job.summary()))


@contextlib.contextmanager
def _say(what: str) -> Iterator[None]:
    """Shows `what` is going on, where somebody is looking."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


@contextlib.contextmanager
def _errors_as_lines(as_json: bool) -> Iterator[None]:
    """Ends the command with one line on stderr and the right exit code, whatever goes wrong."""
    try:
        yield
    except TightfitError as error:
        raise _ended(error, str(error), error.exit_code, as_json, error.facts) from error
    except KeyboardInterrupt as error:
        raise _ended(error, "interrupted: nothing was written", 130, as_json) from error
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise _ended(error, line, 1, as_json) from error


def _ended(
    error: BaseException, message: str, code: int, as_json: bool, facts: dict[str, object] | None = None
) -> typer.Exit:
    typer.secho(f"tightfit: {message}", err=True, fg="red")
    if as_json:
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message, **(facts or {})}}, default=str))
    return typer.Exit(code)


if __name__ == "__main__":
    app()
