"""Scores the demo model: 300 random prompts with fresh seeds, generated and judged from the pixels by rules.

    python tools/score_demo.py

Prints the share of one-object and of two-object prompts that came out entirely right, and what went wrong;
writes bench/results/demo-score.json and the sheet of prompts and pictures for the README.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from demo_training.scores import GUIDANCE, STEPS, verdicts
from demo_training.sheet import draw_sheet
from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.demo.scenes import random_scene
from tightfit.files import replacing

ROOT = Path(__file__).parent.parent


def main(
    model: Annotated[Path, typer.Option(help="Pipeline folder.")] = ROOT / "src/tightfit/demo/model",
    prompts: Annotated[int, typer.Option(help="Half of them name one object, half two.")] = 300,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one.")] = None,
    results: Annotated[Path, typer.Option(help="Where the scores go.")] = ROOT / "bench/results/demo-score.json",
    sheet: Annotated[Path, typer.Option(help="Where the picture sheet goes.")] = ROOT / "docs/demo-sheet.png",
) -> None:
    import torch

    seed = random.randrange(2**32) if seed is None else seed
    pipe = load_pipeline(check_folder(model), torch.float32)
    rng = random.Random(seed)
    facts: dict[str, object] = {"seed": seed, "steps": STEPS, "guidance": GUIDANCE}
    for things, name in ((1, "one_object"), (2, "two_objects")):
        scenes = [random_scene(rng, things) for _ in range(prompts // 2)]
        batches = track(range(0, len(scenes), 15), description=name.replace("_", " "))
        judged = [v for first in batches for v in verdicts(pipe, scenes[first : first + 15], seed=rng.getrandbits(32))]
        right = sum(verdict.right for verdict in judged)
        facts[name] = {"prompts": len(judged), "right": right, "share": round(right / len(judged), 4)}
        for verdict in judged:
            if not verdict.right:
                print(f"  {verdict.asked}: {verdict.complaint}")
        print(f"{name.replace('_', ' ')}: {right} of {len(judged)} entirely right ({right / len(judged):.1%})")
    with replacing(results) as partial:
        partial.write_text(json.dumps(facts, indent=2) + "\n")
    draw_sheet(pipe, sheet)


if __name__ == "__main__":
    typer.run(main)
