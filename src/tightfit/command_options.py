"""Options that several commands have, as types that typer reads; commands that name their positional arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = [
    "Allow",
    "AsJson",
    "Backward",
    "Batch",
    "Cache",
    "CardsPerNode",
    "Changes",
    "Dtype",
    "Frames",
    "Guidance",
    "Level",
    "Link",
    "Negative",
    "Nodes",
    "Pixels",
    "PlanFile",
    "Quality",
    "Ram",
    "RunCommand",
    "Steps",
    "Timeline",
    "Where",
    "Within",
]

Level = Annotated[int | None, typer.Option(help="0 all on the device … 3 the least memory.")]
PlanFile = Annotated[Path | None, typer.Option(help="YAML or JSON file of plan fields.")]
Within = Annotated[str | None, typer.Option("--budget", help="What the device may hold. Default: what it has.")]
Ram = Annotated[str | None, typer.Option(help="What may wait in RAM; on a CPU, all of the process.")]
Allow = Annotated[list[str] | None, typer.Option(help="With --budget: a lossy technique, if need be, e.g. fp8.")]
Cache = Annotated[
    str | None,
    typer.Option(metavar="STRATEGY", help="With --budget: a step cache, e.g. first-block,threshold=0.1."),
]
Quality = Annotated[
    float | None,
    typer.Option(metavar="DB", help="With --allow step-cache: least PSNR to the pictures without. Default: 30."),
]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A plan field.")]
Pixels = Annotated[int | None, typer.Option(help="Pixels.")]
Frames = Annotated[int | None, typer.Option(help="Frames of a video.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option(help="How strongly the prompt steers.")]
Batch = Annotated[int, typer.Option(help="Pictures of the same prompt.")]
Backward = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="With a backward pass: lora, lora:16, parameters or inputs."),
]
CardsPerNode = Annotated[
    int | None, typer.Option(help="Cards of this kind in a computer, which share the rows of each operation.")
]
Nodes = Annotated[int | None, typer.Option(help="Computers with that many cards each.")]
Link = Annotated[str | None, typer.Option(metavar="RATE", help="Between computers, e.g. 100Gbit.")]
Timeline = Annotated[Path | None, typer.Option(help="Draw where the memory goes, as PNG or SVG.")]
Negative = Annotated[str | None, typer.Option("--negative-prompt", help="What to keep away from.")]
Where = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, loopback, or the first of several: cuda,cpu.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Last line of stdout: one JSON object.")]


class RunCommand(TyperCommand):
    """A command whose usage line names its positional arguments, as their metavar says: [MODEL] PROMPT."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        named = [str(each.metavar) for each in self.params if each.param_type_name == "argument"]
        return ["[OPTIONS]", *named[0].split()]
