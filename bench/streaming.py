"""Streaming on the simulated clock: full-size denoisers that do not fit, on cards that nobody has here.

    python bench/streaming.py [--models flux.1-dev,…] [--cards rtx4090,rtx3060] [--shares 0.05,0.25,0.5,0.75]

Device memory for weights is a share of the denoiser's bytes. The card has that and what its allocator holds beside a
denoiser that is all there, not a byte more, and refuses what does not fit. A step is compared with two bounds:

- max(compute, streamed bytes / link), which no step can beat;
- the same with memory in mind: in any stretch of a step, what is used there must come in, but for what can be there
  already. Where layers that are long to bring and short to compute stand together, this bound is the higher one.

The clock is exact, so every figure is measured once. Writes bench/results/streaming-simulated.json.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from measuring import write
from tightfit import PlanError, fit
from tightfit.catalog.known import known_card, known_model
from tightfit.checkpoint.loading import quietly
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components, find_layers, find_role, inspect_component
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.footprints import measure_footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tightfit.units import format_bytes

MODELS = "sdxl,flux.1-dev,cogvideox-5b,wan-2.1-14b"
ROOM = 2**50
STEPS = 4


@dataclass
class Run:
    """What was seen of one call."""

    starts: list[tuple[int, int]] = field(default_factory=list)  # of each pass: nanoseconds, bytes over the link
    uses: list[tuple[str, int]] = field(default_factory=list)  # of the last pass: layer, nanoseconds
    phase: Any = None
    plan: Any = None
    bytes_out: int = 0
    notes: tuple[str, ...] = ()

    def step(self, number: int) -> tuple[float, int]:
        """Seconds and bytes in of one pass."""
        (begin, before), (end, after) = self.starts[number : number + 2]
        return (end - begin) * 1e-9, after - before


def play(model: str, accelerator: Accelerator, chosen: dict[str, Any]) -> Run:
    """One call of the pipeline whose denoiser is `chosen`; its other parts stream with as little as runs well."""
    card = SimulatedCard(0, accelerator, Host())
    use_cards([card])
    known = known_model(model)
    pipe = build_known(known)
    pipe.set_progress_bar_config(disable=True)
    parts = find_components(pipe)
    name = denoiser_of(parts)
    request = Request(**{key: value for key, value in known.request if value is not None} | {"steps": STEPS})
    others = {other: {"placement": "stream"} for other in parts if other != name}
    fitted = fit(pipe, plan={"components": others | {name: chosen}}, request=request, device="simulated:0")
    run = Run()

    def note(layer: str) -> Any:
        return lambda *_: run.uses.append((layer, card.now))

    def begins(*_: Any) -> None:
        run.uses.clear()
        run.starts.append((card.now, card.bytes_in))

    def ends(*_: Any) -> None:
        run.uses.append(("", card.now))
        if len(run.starts) == STEPS:
            run.starts.append((card.now, card.bytes_in))

    parts[name].register_forward_pre_hook(begins)
    parts[name].register_forward_hook(ends)
    for layer, modules in find_layers(parts[name]).items():
        for module in modules:
            module.register_forward_pre_hook(note(layer))
    with torch.no_grad(), quietly():
        pipe(**call_arguments(pipe, Prompt(PROMPT, seed=0), request) | {"output_type": "latent"})
    trace = fitted.report().trace
    run.phase = next(phase for phase in trace.phases if phase.name == "denoise")
    run.plan, run.bytes_out = fitted.plan.components[name], sum(phase.bytes_out for phase in trace.phases)
    run.notes = trace.notes
    use_cards([])
    return run


def denoiser_of(parts: dict[str, Any]) -> str:
    return next(name for name, part in parts.items() if find_role(name, part) == "denoiser")


def bound_with_memory(uses: list[tuple[str, int]], sizes: dict[str, int], link: float, memory: int) -> float:
    """Seconds that a step takes at least, with `memory` bytes for weights: the worst of all stretches of layers."""
    times = [(later[1] - use[1]) * 1e-9 for use, later in itertools.pairwise(uses)]
    layers = [sizes[layer] for layer, _ in uses[:-1]]
    whole = sum(times)
    worst = whole
    for start in range(len(layers)):
        size, compute = 0, 0.0
        for index in range(start, start + len(layers)):
            size += layers[index % len(layers)]
            compute += times[index % len(layers)]
            worst = max(worst, whole - compute + max(compute, (size - memory) / link))
    return worst


def rows_of(model: str, card: str, shares: list[float]) -> list[dict[str, Any]]:
    accelerator = known_card(card)
    link = accelerator.link_rate or 0.0
    roomy = accelerator.model_copy(update={"bytes": ROOM})
    parts = find_components(build_known(known_model(model)))
    component = inspect_component(denoiser_of(parts), parts[denoiser_of(parts)])
    seconds = CostModel(component, accelerator).layer_seconds(measure_footprint(model), component)
    there = play(model, roomy, {"placement": "offload"})
    compute, _ = there.step(2)
    beside = there.phase.peak_reserved - component.bytes
    sizes = {layer.name: layer.bytes for layer in component.layers}
    rows = []
    for share in shares:
        weights = int(share * component.bytes)
        row: dict[str, Any] = {"model": model, "card": card, "share": share, "weights": weights}
        try:
            chosen = resolve_streaming(component, ComponentPlan(placement="stream", weight_memory=weights), seconds)
            size = weights + beside
            run = play(model, accelerator.model_copy(update={"bytes": size}), chosen.to_mapping())
        except (PlanError, torch.OutOfMemoryError) as error:
            rows.append(row | {"failed": str(error).splitlines()[0]})
            continue
        steady, moved = run.step(2)
        first, _ = run.step(0)
        bound = max(compute, moved / link)
        memory = bound_with_memory(there.uses, sizes, link, weights)
        rows.append(
            row | {
                "compute": compute, "streamed": moved, "link_seconds": moved / link, "steady": steady, "first": first,
                "to_bound": steady / bound, "to_bound_with_memory": steady / max(bound, memory),
                "first_to_steady": first / steady, "ring": run.plan.ring_buffer,
                "resident": len(run.plan.resident_layers), "layers": len(sizes), "card_bytes": size,
                "peak_weights": run.phase.peak_weights,
                "peak": run.phase.peak_bytes, "peak_reserved": run.phase.peak_reserved, "weights_out": run.bytes_out,
                "on_demand": run.phase.on_demand, "notes": run.notes,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--models", default=MODELS)
    options.add_argument("--cards", default="rtx4090,rtx3060")
    options.add_argument("--shares", default="0.05,0.25,0.5,0.75")
    options.add_argument("--name", default="streaming-simulated")
    asked = options.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models.split(","):
        for card in asked.cards.split(","):
            for row in rows_of(model, card, [float(share) for share in asked.shares.split(",")]):
                rows.append(row)
                print(told(row), flush=True)
    write(asked.name, {"rows": rows})


def told(row: dict[str, Any]) -> str:
    head = f"{row['model']:14} {row['card']:8} {row['share']:4.0%} {format_bytes(row['weights']):>8}"
    if "failed" in row:
        return f"{head}  {row['failed']}"
    return (
        f"{head}  step {row['steady']:8.3f} s = {row['to_bound']:.3f} x max({row['compute']:.3f}, "
        f"{row['link_seconds']:.3f}), {row['to_bound_with_memory']:.3f} x the bound with memory; first "
        f"{row['first_to_steady']:.2f} x; peak {format_bytes(row['peak'])} of {format_bytes(row['card_bytes'])}; "
        f"on demand {row['on_demand']}; {'; '.join(row['notes'])}"
    )


if __name__ == "__main__":
    main()
