"""diffusers' device_map="balanced" beside ours, for the same limits: components lost, peak of each card, what fails.

    python bench/device_maps.py [--models flux.1-dev,sd-1.5,sdxl,sd3-medium] [--shares 0.25,0.5,1]
                                [--tiny StableDiffusion,StableDiffusionXL,Flux] [--tiny-shares 0.5,1,2]

Without cards, diffusers cannot load onto them. What it would do is computed by its own functions: for folders of the
tests' pipelines, widened, by `_get_final_device_map`, which `from_pretrained` calls with the folder; for known models,
of which there are no weights, by `_assign_components_to_devices` with the sizes that the former would give it. What is
not in the map that comes out is lost: `from_pretrained` then leaves it in host memory, without hooks, and the call
fails. The map is then tried on two simulated cards of exactly the limits, with weights that are only shapes: components
are dispatched by the calls of accelerate that diffusers makes for each (a map of one entry; those on "cpu" are brought
to card 0 layer by layer), and the pipeline is called. Ours is `make_plan` with a balanced DeviceMap, applied and called
likewise. Both limits are a share of the bytes of all weights. Peaks are bytes that the cards' allocators reserved.
Writes bench/results/device-maps.json.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import dispatch_model
from accelerate.utils import compute_module_sizes, get_max_memory
from diffusers.pipelines import pipeline_loading_utils as theirs

from budgets import ROOM, requests_of
from measuring import write
from rivals import let_data_move, on_hollow_host
from tightfit import Budget, BudgetTooSmall, make_plan, measure_footprint
from tightfit.catalog.known import known_card, known_model
from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.loading import quietly
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.simulate import SimulationRun
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

CARD = "rtx4090"
SCALE = 12  # times as wide as in the tests: their weights take megabytes then, not kilobytes
STEPS = 2


def their_map(subject: Any, parts: dict[str, torch.nn.Module], size: int) -> dict[str, int | str]:
    """The map that diffusers makes for two cards of `size` bytes each."""
    memory: dict[int | str, int | str] = {0: size, 1: size}
    if isinstance(subject, Path):
        kind = getattr(diffusers, check_folder(subject).pipeline_class)
        entries = kind.load_config(subject)
        named = {name: entry for name, entry in entries.items() if isinstance(entry, list) and entry[0]}
        dtype = next(iter(parts.values())).dtype
        made = theirs._get_final_device_map(
            "balanced", kind, {}, named, diffusers.pipelines, memory, dtype=dtype, cached_folder=str(subject)
        )
        return dict(made)
    sizes = {name: compute_module_sizes(part)[""] for name, part in parts.items()}
    sizes = dict(sorted(sizes.items(), key=lambda item: item[1], reverse=True))
    by_device = theirs._assign_components_to_devices(sizes, get_max_memory(memory))
    return {name: device for device, names in by_device.items() for name in names}


def two_cards(size: int) -> list[SimulatedCard]:
    host, like = Host(), known_card(CARD).model_copy(update={"bytes": size})
    cards = [SimulatedCard(number, like, host) for number in range(2)]
    use_cards(cards)
    return cards


def peaks_of(cards: list[SimulatedCard], size: int) -> dict[str, Any]:
    peaks = [card.held.peak for card in cards]
    return {"peaks": peaks, "fullest": max(peaks) / size}


def dispatched(pipe: Any, made: dict[str, int | str]) -> Any:
    """`pipe`, with its components where the map has them, by the calls of diffusers' `load_sub_model`."""
    for name, part in find_components(pipe).items():
        if name in made:
            skipped = getattr(part, "_skip_keys", None)
            if made[name] == "cpu":
                main, state = torch.device("privateuseone", 0), part.state_dict()
                dispatch_model(part, {"": "cpu"}, main, state, force_hooks=True, skip_keys=skipped)
            else:
                device = torch.device("privateuseone", int(made[name]))
                dispatch_model(part.to(device), {"": device}, force_hooks=True, skip_keys=skipped)
    return pipe


def diffusers_row(subject: Any, pipe: Any, asked: Request, size: int) -> dict[str, Any]:
    """Their map, and what comes of a call."""
    parts = find_components(pipe)
    made = their_map(subject, parts, size)
    row: dict[str, Any] = {"lost": [name for name in parts if name not in made], "map": made}
    cards = two_cards(size)
    try:
        ready = dispatched(on_hollow_host(pipe), made)
        with torch.no_grad(), quietly():
            arguments = call_arguments(ready, Prompt(PROMPT, seed=0), asked)
            ready(**arguments | {"output_type": "pt", "generator": torch.Generator().manual_seed(0)})
        return row | peaks_of(cards, size)
    except RuntimeError as error:  # out of memory is one
        return row | {"failed": str(error).splitlines()[0]}
    finally:
        use_cards([])


def played(subject: Any, plan: Plan, asked: Request, size: int) -> dict[str, Any]:
    """Peaks of both cards in one call under a plan, or how it failed."""
    cards = two_cards(size)
    model = check_folder(subject) if isinstance(subject, Path) else subject
    try:
        host = next(card for card in cards if f"simulated:{card.index}" == plan.device)
        SimulationRun(model, host, plan, asked).run()
        return peaks_of(cards, size)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        use_cards([])


def ours(footprint: Footprint, subject: Any, asked: Request, size: int) -> dict[str, Any]:
    """A balanced plan of tightfit, played."""
    names = ["simulated:0", "simulated:1"]
    cards = tuple(known_card(CARD).model_copy(update={"bytes": ROOM, "name": name}) for name in names)
    machine = Machine(accelerators=cards, ram=ROOM, pinnable=ROOM, cores=1)
    budget = Budget(devices=dict.fromkeys(names, size))
    try:
        plan = make_plan(footprint, machine, budget, device_map=DeviceMap(strategy="balanced"))
    except BudgetTooSmall as error:
        return {"lost": [], "refused": str(error)}
    where = {name: part.described for name, part in plan.components.items()}
    lost = [component.name for component in footprint.components if component.name not in plan.components]
    told = {name: plan.predicted_peak(name) for name in plan.devices}
    return {"lost": lost, "map": where, "predicted": told, **played(subject, plan, asked, size)}


def rows_of(
    name: str, subject: Any, make: Callable[[], Any], asked: Request, shares: list[float]
) -> Iterator[dict[str, Any]]:
    footprint = measure_footprint(subject, asked)
    whole = sum(component.bytes for component in footprint.components)
    for share in shares:
        size = int(share * whole)
        pipe = make()
        pipe.set_progress_bar_config(disable=True)
        row = {"model": name, "request": asked.described, "share": share, "each_card": size}
        row |= {"diffusers": diffusers_row(subject, pipe, asked, size)}
        row |= {"tightfit": ours(footprint, subject, asked, size)}
        print(row, flush=True)
        yield row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="flux.1-dev,sd-1.5,sdxl,sd3-medium")
    options.add_argument("--tiny", default="StableDiffusion,StableDiffusionXL,Flux")
    options.add_argument("--shares", default="0.25,0.5,1")
    options.add_argument("--tiny-shares", default="0.5,1,2")
    chosen = options.parse_args()
    shares, of_tiny = ([float(share) for share in text.split(",")] for text in (chosen.shares, chosen.tiny_shares))
    rows: list[dict[str, Any]] = []
    let_data_move()
    for name in filter(None, chosen.tiny.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            case = next(case for case in CASES if case.name == name)
            case.make(SCALE).save_pretrained(folder)
            asked = Request(height=64, width=64, steps=STEPS)
            make = functools.partial(case.make, SCALE)
            rows += rows_of(f"{name}, {SCALE} times as wide", Path(folder), make, asked, of_tiny)
    for name in filter(None, chosen.models.split(",")):
        asked = requests_of(name)[1].model_copy(update={"steps": STEPS})
        rows += rows_of(name, name, functools.partial(build_known, known_model(name)), asked, shares)
        write("device-maps", {"card": CARD, "rows": rows})  # by and by


if __name__ == "__main__":
    main()
