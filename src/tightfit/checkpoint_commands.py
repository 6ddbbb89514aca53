"""Commands for files of models, which `cli` registers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tightfit.command_options import AsJson, Batch, Dtype, Frames, Guidance, Negative, Pixels, Where
from tightfit.errors import InputError
from tightfit.run.plan_options import call_request
from tightfit.terminal import errors_as_lines, quiet_transformers, say, showing_steps
from tightfit.units import format_bytes

__all__ = ["EXPORT_EXAMPLES", "SHARD_EXAMPLES", "export", "shard"]

SHARD_EXAMPLES = """Write a model as a diffusers folder with sharded weights and checksums.

Examples:

  tightfit shard ./flux ./flux-shards --max-shard-size 2GB
  tightfit shard ./flux ./flux-bf16 --dtype bfloat16
  tightfit shard ./flux ./transformer --component transformer
  tightfit shard sd15.safetensors ./sd15 --config ./sd15-layout
  tightfit shard flux.safetensors ./transformer --config ./flux --component transformer
  tightfit shard ./flux-shards --verify

SRC is a diffusers folder, the folder of one network, or a single safetensors
file, also one as its authors published it, if diffusers can convert that;
--config then names a diffusers folder of such a model, whose weights need not
be there. The network is never used. SRC is read piece by piece; DST is there
when it is whole. After an interruption the same command goes on from there.
"""


EXPORT_EXAMPLES = """Export a model's denoiser to a file, for one size of request.

Examples:

  tightfit export --out unet.exported
  tightfit export ./sdxl --height 1024 --width 1024 --out sdxl.exported
  tightfit run ./sdxl "a lighthouse" --set components.unet.exported=sdxl.exported

The file holds no weights and no code. It is refused for other shapes, another
dtype, another configuration and other versions of torch and diffusers.
"""


def export(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder or a hub id.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    component: Annotated[str | None, typer.Option(help="Which network, where there are several denoisers.")] = None,
    height: Pixels = None,
    width: Pixels = None,
    frames: Frames = None,
    guidance: Guidance = None,
    batch: Batch = 1,
    negative: Negative = None,
    device: Where = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    with errors_as_lines(as_json):
        asked = call_request({}, height=height, width=width, frames=frames, guidance=guidance, batch=batch, steps=None)
        with say("exporting"), quiet_transformers():
            from tightfit.run.job import export_model

            inputs = {} if negative is None else {"negative_prompt": negative}
            exported_file = export_model(model, out, asked, name=component, device=device, dtype=dtype, inputs=inputs)
        typer.echo(f"wrote {out}: {len(exported_file.graph.operations)} operations, no weights")
        if as_json:
            typer.echo(json.dumps({"outputs": [str(out)], "operations": len(exported_file.graph.operations)}))


def shard(
    paths: Annotated[list[Path], typer.Argument(metavar="SRC DST", help="What to read, and the folder to write.")],
    *,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file of weights.")] = "2GB",
    dtype: Annotated[str | None, typer.Option(help="Round weights to float32, float16 or bfloat16.")] = None,
    component: Annotated[str | None, typer.Option(help="Write this network alone, as a folder of its own.")] = None,
    config: Annotated[Path | None, typer.Option(help="The layout of a single file: a diffusers folder.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare DST with its checksums, and write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout: one JSON object.")] = False,
) -> None:
    with errors_as_lines(as_json):
        if len(paths) not in ((1, 2) if verify else (2,)):
            raise InputError(f"shard takes SRC and DST, or DST --verify, not {len(paths)} paths: {paths[0]} …")
        with say("starting"):
            from tightfit.run.shard import shard_model, verify_model
        with showing_steps() as on_progress:
            if verify:
                found = verify_model(paths[-1], on_progress)
            else:
                found = shard_model(paths[0], paths[1], max_shard_size, dtype, component, config, on_progress)
        size = format_bytes(found.size)
        kept = f", of which {found.kept} ({format_bytes(found.kept_size)}) were finished before" if found.kept else ""
        for note in found.notes:
            typer.secho(note, err=True, fg="yellow")
        if verify:
            typer.echo(f"{found.path} is whole: {found.files} files, {size}, as its checksums say")
        else:
            typer.echo(f"wrote {found.path}: {found.files} files, {size}{kept}")
        if as_json:
            typer.echo(json.dumps(asdict(found), default=str))
