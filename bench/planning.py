"""How long planning takes: a first plan, with the autoencoder's program or without, and another of what is known.

    python bench/planning.py [--models sdxl,wan-2.1-14b] [--ways first,exporting,known] [--shares 0.15,0.6] [--keep]

For budgets that are shares of the bytes of all weights, each in a process of its own; importing torch, and what the
pipeline is made of in diffusers and transformers, is not counted. "first" finds what comes with the package and nothing
else on disk; "exporting" not that either, as if the libraries had other versions; "known" finds the footprint, whatever
it leaves out, and imports no torch. Models that the catalog does not have (unlisted.py) are planned for from folders,
"first" only. Wall seconds are what counts, as several processes work on a first plan: nothing else may run. Beside them
stand the CPU seconds of the first process, and `parts` says where these went, each without those that are named
further below it and were called from it. Writes bench/results/planning.json.
"""

from __future__ import annotations

import argparse
import itertools
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

SHARES = "0.15,0.6,1.5"
CARD = "rtx4090"
PARTS = (  # module, of which class, what, under which name
    ("tightfit.run.simulate", "SimulationRun", "__init__", "building"),
    ("tightfit.run.simulate", "SimulationRun", "run", "simulating"),
    ("tightfit.measure.call_profiler", "CallProfiler", "phases", "rooms of phases"),
    ("tightfit.run.footprints", "", "measure_variants", "variants, else"),
    ("tightfit.run.strip_profiles", "AutoencoderStripProfiles", "with_strips", "strips, else"),
    ("tightfit.run.strip_profiles", "", "program_of", "programs"),
    ("tightfit.apply.activations.strips.executor", "", "kept_strip_plan", "strip plans"),
    ("tightfit.apply.activations.strips.strip_plan", "StripPlan", "peak_and_allocator_bytes", "allocator bytes"),
    ("tightfit.run.strip_profiles", "", "profile_stages", "stages"),
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
                return iter(list(found)) if name == "stages" else found  # they are made one by one
            finally:
                took = time.process_time() - begun
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed

    def follow(self) -> None:
        import importlib

        for module, owner, what, name in PARTS:
            store: Any = importlib.import_module(module)
            store = getattr(store, owner) if owner else store
            setattr(store, what, self.over(getattr(store, what), name))


def first(model: str, share: float, *, exporting: bool = False) -> dict[str, Any]:
    """In this process: measure as far as the budget needs it, and plan."""
    import diffusers  # not counted
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from tightfit.catalog.known import known_card, known_model

    index = Path(model) / "model_index.json"
    pipeline = json.loads(index.read_text())["_class_name"] if index.exists() else known_model(model).pipeline
    getattr(diffusers, pipeline)  # which is when diffusers imports it

    took = Took()
    from tightfit.apply.activations.strips import graph_cache as archive
    from tightfit.errors import BudgetTooSmall
    from tightfit.plan.default_rates import computer_with
    from tightfit.plan.options import SearchCaches
    from tightfit.run.calibration import CalibrationStore, PlanningInputs
    from tightfit.run.footprints import Measurer
    from tightfit.run.limits import Limits
    from tightfit.schema.footprint import Footprint
    from tightfit.schema.machine import Budget
    from tightfit.schema.request import Request

    if exporting:
        archive.SHIPPED = "nowhere"
    parts, watch = {"imports of tightfit's own": took.so_far()["cpu"]}, Watch()
    watch.follow()
    machine = computer_with(known_card(CARD))

    workings = SearchCaches()

    def limits(known: Footprint) -> Limits:
        return Limits(Budget(device=int(share * sum(component.bytes for component in known.components))))

    def planning_inputs(known: Footprint) -> PlanningInputs:
        return PlanningInputs(known, machine, CalibrationStore(None, machine.accelerators[0]), None, workings)

    found = planning_inputs(
        Measurer(model).measure(Request(), None, lambda known: planning_inputs(known).missing(limits(known)))
    )
    measured = took.so_far()
    try:
        refused = not found.plan(limits(found.footprint))
    except BudgetTooSmall:
        refused = True
    whole = took.so_far()
    parts |= watch.seconds
    parts |= {"else": measured["cpu"] - sum(parts.values()), "planning": whole["cpu"] - measured["cpu"]}
    return whole | {"refused": refused, "left_out": found.footprint.not_measured, "parts": parts}


def known(model: str, share: float) -> dict[str, Any]:
    """In this process: what `tightfit plan MODEL --card` does, import and all."""
    took = Took()
    from tightfit.errors import BudgetTooSmall
    from tightfit.run.answer_cache import footprint_question, recalled_footprint
    from tightfit.run.limits import Limits
    from tightfit.run.predict import forecast
    from tightfit.schema.footprint import Footprint
    from tightfit.schema.machine import Budget
    from tightfit.schema.request import Request
    from tightfit.terminal import say

    imports = took.so_far()
    kept = recalled_footprint(footprint_question(model, Request(), None), lambda _: ())
    assert isinstance(kept, Footprint)
    size, took = int(share * sum(component.bytes for component in kept.components)), Took()
    try:
        forecast(model, CARD, {}, Request(), say, Limits(Budget(device=size)))
        refused = False
    except BudgetTooSmall:
        refused = True
    whole = took.so_far()
    whole = {kind: seconds + imports[kind] for kind, seconds in whole.items()}
    return whole | {"refused": refused, "imports": imports["cpu"], "torch": "torch" in sys.modules}


class Took:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def so_far(self) -> dict[str, float]:
        return {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}


def _in_a_process(way: str, model: str, share: str, cache: Path) -> dict[str, Any]:
    folder = cache / "tightfit"
    kept = ("programs", "strip_plans", "footprints") if way == "known" else ()
    for part in folder.iterdir() if folder.exists() else ():
        if part.name not in kept and part.is_dir():
            shutil.rmtree(part)
    script = [sys.executable, __file__, "--inside", way, "--models", model, "--shares", share]
    there = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(script, env=there, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="all")
    options.add_argument("--ways", default="first,exporting,known")
    options.add_argument("--shares", default=SHARES, help="budgets, as shares of the bytes of all weights")
    options.add_argument("--keep", action="store_true", help="other rows that are written already")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inside:
        about = chosen.models, float(chosen.shares)
        exporting = chosen.inside == "exporting"
        print(json.dumps(known(*about) if chosen.inside == "known" else first(*about, exporting=exporting)))
        return
    from measuring import RESULTS, write
    from tightfit.catalog.known import known_model, model_names
    from unlisted import MODELS, make_folder

    models = [*model_names(), *MODELS] if chosen.models == "all" else chosen.models.split(",")
    written = json.loads((RESULTS / "planning.json").read_text())["rows"] if chosen.keep else []
    rows = [row for row in written if row["model"] not in models or row["way"] not in chosen.ways.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            path = str(make_folder(model, Path(folder))) if model in MODELS else model
            clip = known_model(MODELS[model][0] if model in MODELS else model).request.frames is not None
            ways = [way for way in chosen.ways.split(",") if path == model or way == "first"]
            for share, way in itertools.product(chosen.shares.split(","), ways):
                found = _in_a_process(way, path, share, Path(folder) / "cache" / model)
                about = {"model": model, "listed": path == model, "clip": clip, "share": float(share), "way": way}
                rows.append(about | found)
                write("planning", {"rows": rows, "load": os.getloadavg()[0]})  # by and by


if __name__ == "__main__":
    main()
