"""How long planning takes: a model's first plan, one with its programs kept, and another budget of a known footprint.

    python bench/planning.py [--models sdxl,wan-2.1-14b] [--ways first,programs,known] [--keep]

Each in a process of its own, importing torch and diffusers not counted. "first" finds nothing on disk; "programs" the
exported programs of autoencoders, as if they had come with the package; "known" the footprint, and imports no torch.
CPU seconds are what counts on a machine that others use; wall seconds stand beside them. `parts` says where they went,
each without those that are named further below it and were called from it. Writes bench/results/planning.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARES = (0.15, 0.6, 1.5)  # of the bytes of all weights
CARD = "rtx4090"
PARTS = (  # module, of which class, what, under which name
    ("tightfit.run.stage", "Stage", "__init__", "building"),
    ("tightfit.run.stage", "Stage", "play", "playing"),
    ("tightfit.measure.ledger", "Ledger", "phases", "rooms of phases"),
    ("tightfit.run.footprints", "", "_denoised", "variants, else"),
    ("tightfit.run.footprints", "", "survey", "survey, else"),
    ("tightfit.apply.activations.strips.survey", "", "program_of", "programs"),
    ("tightfit.apply.activations.strips.ways", "", "kept_course", "courses"),
    ("tightfit.apply.activations.strips.course", "Course", "room", "rooms of courses"),
    ("tightfit.apply.activations.strips.survey", "", "legs_of", "legs"),
)


class Watch:
    """Seconds of CPU by part, each without what it called that is a part too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # what parts inside of each that is under way took

    def over(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            self._inside.append(0.0)
            try:
                found = work(*args, **kwargs)
                return iter(list(found)) if name == "legs" else found  # they are made one by one
            finally:
                took = time.process_time() - begun
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed

    def follow(self) -> None:
        import importlib

        for module, owner, what, name in PARTS:
            home: Any = importlib.import_module(module)
            home = getattr(home, owner) if owner else home
            setattr(home, what, self.over(getattr(home, what), name))


def plans(footprint: Any) -> dict[str, Any]:
    """How long each budget's plan takes."""
    from tightfit.catalog.known import known_card
    from tightfit.errors import BudgetTooSmall
    from tightfit.plan.guesses import computer_with
    from tightfit.plan.planner import make_plan
    from tightfit.records import Budget

    machine, found = computer_with(known_card(CARD)), {}
    whole = sum(component.bytes for component in footprint.components)
    for share in SHARES:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            make_plan(footprint, machine, Budget(device=int(share * whole)))
            refused = False
        except BudgetTooSmall:
            refused = True
        taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        found[f"{share:.0%}"] = taken | {"refused": refused}
    return found


def first(model: str) -> dict[str, Any]:
    """In this process: measure, and plan."""
    import diffusers  # noqa: F401 - not counted
    import torch  # noqa: F401
    import transformers  # noqa: F401

    cpu, wall = time.process_time(), time.perf_counter()
    from tightfit.run.footprints import measure_footprint

    imported, watch = time.process_time() - cpu, Watch()
    watch.follow()
    footprint = measure_footprint(model)
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    parts = {"imports of tightfit's own": imported, **watch.seconds}
    parts["else"] = took["cpu"] - sum(parts.values())
    return {**took, "parts": parts, "plans": plans(footprint)}


def known(model: str) -> dict[str, Any]:
    """In this process: what `tightfit plan MODEL --card` does, import and all."""
    cpu, wall = time.process_time(), time.perf_counter()
    from tightfit.errors import BudgetTooSmall
    from tightfit.footprint import Footprint
    from tightfit.records import Budget, Request
    from tightfit.run.forecasts import forecast
    from tightfit.run.predictions import footprint_question, recalled
    from tightfit.run.wishes import Limits
    from tightfit.terminal import say

    imported = time.process_time() - cpu
    footprint = recalled(Footprint, footprint_question(model, Request(), None))
    assert footprint is not None
    whole, found = sum(component.bytes for component in footprint.components), {}
    for share in SHARES:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            forecast(model, CARD, {}, Request(), say, Limits(Budget(device=int(share * whole))))
            refused = False
        except BudgetTooSmall:
            refused = True
        taken = {"cpu": imported + time.process_time() - cpu, "wall": time.perf_counter() - wall}
        found[f"{share:.0%}"] = taken | {"refused": refused}
    return {"imports": imported, "plans": found, "torch": "torch" in sys.modules}


def _in_a_process(way: str, model: str, cache: Path) -> dict[str, Any]:
    folder = cache / "tightfit"
    kept = {"first": (), "programs": ("programs",), "known": ("programs", "courses", "footprints")}[way]
    for part in folder.iterdir() if folder.exists() else ():
        if part.name not in kept and part.is_dir():
            shutil.rmtree(part)
    script = [sys.executable, __file__, "--inside", way, "--models", model]
    there = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(script, env=there, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="all")
    options.add_argument("--ways", default="first,programs,known")
    options.add_argument("--keep", action="store_true", help="rows of other models that are written already")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inside:
        print(json.dumps(known(chosen.models) if chosen.inside == "known" else first(chosen.models)))
        return
    from measuring import RESULTS, write
    from tightfit.catalog.known import model_names

    models = model_names() if chosen.models == "all" else chosen.models.split(",")
    written = json.loads((RESULTS / "planning.json").read_text())["rows"] if chosen.keep else []
    rows = [row for row in written if row["model"] not in models]
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for way in chosen.ways.split(","):
                rows.append({"model": model, "way": way, **_in_a_process(way, model, Path(folder) / model)})
                write("planning", {"rows": rows, "load": os.getloadavg()[0]})  # by and by


if __name__ == "__main__":
    main()
