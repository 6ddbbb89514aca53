"""The command-line interface: each command calls functions of `tightfit.run`. Errors are one line, no traceback."""

from __future__ import annotations

import json
import logging
import random
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.batch_command import BATCH_EXAMPLES, batch
from tightfit.calibrate_command import CALIBRATE_EXAMPLES, calibrate
from tightfit.checkpoint_commands import EXPORT_EXAMPLES, SHARD_EXAMPLES, export, shard
from tightfit.command_options import (
    Allow,
    AsJson,
    Backward,
    Batch,
    Cache,
    CardsPerNode,
    Changes,
    Dtype,
    Frames,
    Guidance,
    Level,
    Link,
    Negative,
    Nodes,
    Pixels,
    PlanFile,
    Quality,
    Ram,
    RunCommand,
    Steps,
    Timeline,
    Where,
    Within,
)
from tightfit.compare_command import COMPARE_EXAMPLES, compare
from tightfit.errors import InputError
from tightfit.run.launched_ranks import launched_rank
from tightfit.run.limits import limits_of
from tightfit.run.plan_options import (
    CHART_EXAMPLES,
    EXAMPLES,
    MACHINE_EXAMPLES,
    PLAN_EXAMPLES,
    RUN_EXAMPLES,
    call_request,
    plan_fields,
)
from tightfit.run.rank_layout import rank_layout
from tightfit.terminal import errors_as_lines, log_to_stderr, quiet_transformers, say, showing_steps

if TYPE_CHECKING:
    from tightfit.run.job import Job
    from tightfit.schema.results import Prediction

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tightfit {metadata.version('tightfit')}")
        raise typer.Exit


@app.callback(help=EXAMPLES)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options of the program itself, and silence messages of libraries while they are imported."""
    # where torchao is installed, diffusers 0.42 imports it for every command, and logs appear: torchao 0.18 names its
    # kernels for other computers, torch 2.13 what torchao should change, diffusers which torchao it misses;
    # matplotlib says where its cache is if the user has no home
    for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)


@app.command(cls=RunCommand, help=RUN_EXAMPLES)
def run(
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
    seed: Annotated[int | None, typer.Option(help="The same seed, the same pictures. Default: random.")] = None,
    batch: Batch = 1,
    negative: Negative = None,
    device: Where = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="PNG file or folder. Default: named after the prompt.")] = None,
    timeline: Timeline = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show bytes and phase while it runs.")] = False,
    snapshot: Annotated[Path | None, typer.Option(help="CUDA: allocator history for pytorch.org/memory_viz.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went, by operation.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log one line per call.")] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json), launched_rank() as rank:
        if len(words) > 2:
            raise InputError(f"run takes [MODEL] PROMPT, not {len(words)} words: put the prompt in quotes")
        choices = plan_fields(plan, level, set_ or [])
        limits = limits_of(budget, ram, allow or [], choices, cache, quality)
        request = call_request(
            choices, negative, height=height, width=width, frames=frames, steps=steps, guidance=guidance, batch=batch
        )
        with say("starting"):
            from tightfit.run.job import Job  # imports torch and diffusers, which takes seconds
            from tightfit.run.prompt import Prompt

        job = Job(
            prompt=Prompt(words[-1], rank.agreed(random.randrange(2**32)) if seed is None else seed, negative),
            request=request,
            choices=choices,
            limits=limits,
            model=words[0] if len(words) == 2 else None,
            device=device,
            dtype=dtype,
            out=out,
            timeline=timeline,
            snapshot=snapshot,
            rank=rank,
        )
        with log_to_stderr(verbose), quiet_transformers():
            _work(job, watch=watch, profile=profile, as_json=as_json)


@app.command(name="plan", help=PLAN_EXAMPLES)
def predict(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A known model (flux.1-dev), a folder or a hub id.")
    ] = None,
    *,
    card: Annotated[str | None, typer.Option(help="A known card, e.g. rtx4090. Default: this computer.")] = None,
    cards_per_node: CardsPerNode = None,
    nodes: Nodes = None,
    link: Link = None,
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
    batch: Batch = 1,
    negative: Negative = None,
    backward: Backward = None,
    timeline: Timeline = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say which kernels compute attention, too.")] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        from tightfit.report.prediction import describe, to_mapping
        from tightfit.run.files import check_timeline
        from tightfit.run.predict import forecast

        layout = rank_layout(cards_per_node, nodes, link)
        if timeline is not None:
            check_timeline(timeline)
        choices = plan_fields(plan, level, set_ or [])
        limits = limits_of(budget, ram, allow or [], choices, cache, quality)
        asked = call_request(
            choices, negative, height=height, width=width, frames=frames, steps=steps, guidance=guidance, batch=batch,
            backward=backward,
        )  # fmt: skip
        if layout is None:
            prediction = forecast(model, card, choices, asked, say, limits, simulated=timeline is not None)
        else:
            from tightfit.run.predict_ranks import forecast_ranks

            prediction = forecast_ranks(
                model, card, layout, choices, asked, say, limits, simulated=timeline is not None
            )
        typer.echo(describe(prediction, verbose=verbose))
        if timeline is not None:
            _draw_predicted(prediction, timeline)
        if as_json:
            typer.echo(json.dumps(to_mapping(prediction)))
    if not prediction.fits:
        raise typer.Exit(3)


@app.command(help=MACHINE_EXAMPLES)
def machine(
    *,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure anew, and forget what runs taught.")] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        with say("starting"):
            from tightfit.report.machine import describe_machine
            from tightfit.run.planning_context import measured_machine
        with showing_steps() as on_progress:
            found = measured_machine(again=refresh, on_progress=on_progress)
        typer.echo(describe_machine(found))
        if as_json:
            typer.echo(found.to_json())


@app.command(help=CHART_EXAMPLES)
def chart(
    *,
    models: Annotated[str | None, typer.Option(help="Known models, with commas between. Default: all.")] = None,
    cards: Annotated[
        str | None,
        typer.Option(help="Known cards, likewise; 2xCARD: two that share each call. Default: one of each size."),
    ] = None,
    ram: Annotated[str | None, typer.Option(help="What may wait in RAM. Default: as much as is wanted.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it as .png, .svg, .md or .json.")] = None,
    level_table: Annotated[str | None, typer.Option(metavar="MODEL", help="One model's levels on one card.")] = None,
    usual_only: Annotated[
        bool, typer.Option("--usual-only", help="Try nothing larger: of clips that takes long.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        from tightfit.run.charting import chart_from_options, chart_text, check_out, write_chart

        if out is not None:
            check_out(out, levels=level_table is not None)
        with showing_steps() as on_progress:
            made = chart_from_options(models, cards, ram, level_table, on_progress, usual_only=usual_only)
        typer.echo(chart_text(made))
        if out is not None:
            write_chart(made, out)
            typer.echo(f"wrote {out}")
        if as_json:
            typer.echo(made.to_json())


app.command(cls=RunCommand, help=COMPARE_EXAMPLES)(compare)
app.command(cls=RunCommand, help=BATCH_EXAMPLES)(batch)
app.command(help=EXPORT_EXAMPLES)(export)
app.command(help=CALIBRATE_EXAMPLES)(calibrate)
app.command(help=SHARD_EXAMPLES)(shard)


def _draw_predicted(prediction: Prediction, timeline: Path) -> None:
    from tightfit.report.prediction import as_report
    from tightfit.report.timeline import draw_timeline

    draw_timeline(as_report(prediction), timeline, f"{prediction.model} on {prediction.card}, predicted")
    typer.echo(f"wrote {timeline}")


def _work(job: Job, *, watch: bool, profile: bool, as_json: bool) -> None:
    from tightfit.run.progress import showing_progress

    job.prepare()
    for warning in job.warnings():
        typer.secho(warning, err=True, fg="yellow")
    with say("planning and loading" if job.limits else "loading"):
        job.load()
    with showing_progress(job.fitted, watch=watch) as on_progress:
        table = job.run(on_progress, profile=profile)
    if table:
        typer.echo(table)
    typer.echo(str(job.report))
    for path in job.written:
        typer.echo(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps(job.summary()))
