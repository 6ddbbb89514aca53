"""Exports known models' autoencoders, as their usual calls use them → src/tightfit/catalog/programs.

python tools/make_programs.py                  # with the versions of torch and diffusers that are here; others' go
python tools/make_programs.py --models sdxl    # of these models only, beside those that are there

That takes a minute or two for a clip, and seconds for a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from tightfit.apply.activations.strips.graph_cache import SHIPPED, mark_of_makers
from tightfit.catalog.known import model_names
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.simulate import SimulationRun
from tightfit.run.strip_profiles import AutoencoderStripProfiles
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.request import Request

FOLDER = Path(__file__).parent.parent / "src/tightfit" / SHIPPED


def take_apart(model: str) -> dict[str, str]:
    """Keeps the programs of a known model's usual call; the mark of each, by what it is of."""
    with unlimited_card(ANY_CARD) as card, ExitStack() as undo:
        stage = SimulationRun(model, card, {"level": 0}, Request())
        calls = AutoencoderStripProfiles(stage.components, undo, expandable=True)
        stage.run(None)
        found = calls.profilers().items()
        return {".".join(kind): survey.mark for kind, survey in found if survey is not None}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="all")
    chosen = options.parse_args().models
    models = model_names() if chosen == "all" else chosen.split(",")
    if chosen == "all":
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "made.json"
    made = {"by": mark_of_makers(), **{name: version(name).partition("+")[0] for name in ("torch", "diffusers")}}
    before = json.loads(file.read_text()) if file.exists() else made | {"programs": {}}
    programs = before.pop("programs")
    if before != made:
        sys.exit("the others were made by other code, or of other versions: make them all")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for model in models:
            programs[model] = take_apart(model)
            print(model, *programs[model], flush=True)
            for mark in programs[model].values():
                with contextlib.suppress(FileNotFoundError):  # it was there already
                    shutil.copy(Path(folder) / f"tightfit/programs/{mark}.zip", FOLDER)
    file.write_text(json.dumps(made | {"programs": programs}, indent=2) + "\n")
    print(f"{sum(program.stat().st_size for program in FOLDER.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
