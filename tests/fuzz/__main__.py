"""`python -m fuzz --results FILE --count N`: one line for each seed that FILE does not have yet."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fuzz.inputs import make_input
from fuzz.server import run_command
from tiny_pipelines import CASES

CODES = (0, 1, 2, 3)
MOST_BYTES = 2 * 2**30


def verdict(seed: int, model: Path, expected: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What became of one input; "wrong" is there if it is not as it should be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = make_input(seed, model, folder)
        ended = run_command(made.words, folder)
        lines = ended.err.splitlines()
        wrong = ""
        if ended.late or ended.code not in CODES or "Traceback" in ended.err:
            wrong = f"code {ended.code}"
        elif made.right and (ended.code or not _same(folder / "a.png", expected)):
            wrong = "the right input failed, or drew another picture"
        elif ended.code == 1 and "Error: " in lines[-1][:60]:
            wrong = "another library's error"
        elif ended.code == 1 and len(lines[-1]) > 2100:
            wrong = "a long line"
        elif ended.peak > MOST_BYTES:
            wrong = f"{ended.peak:,} bytes"
        elif ended.code in (1, 2) and (folder / "a.png").exists():
            wrong = "a picture in spite of the error"
        elif left := [path.name for path in folder.iterdir() if path.name.startswith((".tightfit", "tightfit-"))]:
            wrong = f"left behind: {left}"
    row = {"seed": seed, "input": made.what, "code": ended.code, "seconds": round(ended.seconds, 1)}
    return row | {"wrong": wrong, "words": made.words, "said": ended.err[-300:]} if wrong else row


def _same(picture: Path, expected: np.ndarray[Any, Any]) -> bool:
    if not picture.exists():
        return False
    with Image.open(picture) as drawn:
        return int(np.abs(np.asarray(drawn).astype(int) - expected).max()) <= 1


def untouched(folder: Path) -> np.ndarray[Any, Any]:
    """Save the model in `folder`, and return the picture that it draws by itself."""
    pipe: Any = CASES[0].make()
    pipe.save_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    drawn = pipe("a fox", height=64, width=64, num_inference_steps=1, generator=generator).images[0]
    return np.asarray(drawn).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after that")
    options = parser.parse_args()
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done, began, folder = {row["seed"] for row in known}, time.monotonic(), Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        expected = untouched(folder / "model")
        with options.results.open("a") as results:
            for seed in (each for each in range(options.count) if each not in done):
                if time.monotonic() - began > options.seconds:
                    break
                row = verdict(seed, folder / "model", expected)
                results.write(json.dumps(row) + "\n")
                results.flush()
                if "wrong" in row:
                    print(json.dumps(row))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
