"""Step caches of full-size models on simulated cards: bytes that are kept, and what streams in skipped steps.

    python bench/step_caches_simulated.py [--only kept,streaming] [--models sdxl,flux.1-dev] [--again]

Rows that are in bench/results/step-caches-simulated.json are left as they are, unless `--again`; each new one is
written at once. Calls have few steps, so that a row takes a minute: what is kept does not depend on their number.

kept: predicted is what the footprint and the plan made of it say before the call. Measured is what the simulated card's
allocator has handed out, as requested, when the denoiser is called, less the same without a cache: the most of all its
calls.

streaming: within a budget on a card of that size. Each transfer of weights is counted for the denoiser's call that
uses what it brought. Predicted is the plan's own forecast, made before the call.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from measuring import RESULTS, write
from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.catalog.known import known_card
from tightfit.plan.default_rates import computer_with
from tightfit.plan.layer_selection import group_layers
from tightfit.plan.options import SearchCaches
from tightfit.run.calibration import CalibrationStore, PlanningInputs
from tightfit.run.footprints import Measurer
from tightfit.run.limits import limits_of
from tightfit.run.simulate import SimulationRun
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.step_cache import STRATEGIES, StepCache
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors
from tightfit.simulator.timeline import Host

NAME = "step-caches-simulated"
ROOM = 2**50
STEPS = 8
SKIPPED = [2, 4, 5]
CARD = "rtx4090"
KEPT_MODELS = ("sdxl", "flux.1-dev", "cogvideox-5b", "wan-2.1-14b", "hunyuanvideo")
FOR_TRANSFORMERS = ("teacache", "sea-cache", "blockdance")
SETTINGS: dict[str, dict[str, Any]] = {
    "magcache": {"magnitudes": [1.0] * STEPS},
    "taylorseer": {"warm_up": 1},
    "taylorseer-lite": {"warm_up": 1},
    "faster-cache": {"warm_up": 1},
    "blockdance": {"warm_up": 1},
    "dual-block": {"warm_up": 1},
}
STREAMED: dict[str, dict[str, Any]] = {
    "flux.1-dev": {},
    "qwen-image": {},
    "wan-2.1-14b": {"height": 480, "width": 832},
}
STREAMING_CARDS = ("rtx3060", "rtx4090")
CACHES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "static, steps named": {"strategy": "static", "skipped_steps": SKIPPED},
    "first-block, steps named": {"strategy": "first-block", "skipped_steps": SKIPPED},
    "first-block, deciding": {"strategy": "first-block"},
}
BUDGET = "8GB"


class Planned(NamedTuple):
    """A footprint with a step cache, and a plan made of it."""

    footprint: Footprint
    plan: Plan


def planned(model: str, card: Accelerator, request: Request, cache: StepCache | None, budget: str | None) -> Planned:
    limits = limits_of(budget, None, [], {}, cache)
    machine, store, search = computer_with(card), CalibrationStore(None, card), SearchCaches()

    def inputs_of(bare: Footprint) -> PlanningInputs:
        return PlanningInputs(bare, machine, store, None, search, cache)

    measurer = Measurer(model).with_cache(cache)
    footprint = measurer.measure(request, None, lambda bare: inputs_of(bare).missing(limits))
    return Planned(footprint, inputs_of(footprint).plan(limits))


@contextmanager
def run_on(model: str, card: Accelerator, choices: Any, request: Request) -> Iterator[SimulationRun]:
    """A pipeline on a new card, whose denoisers run in every step."""
    simulated = SimulatedCard(0, card, Host())
    use_cards([simulated])
    try:
        simulation = SimulationRun(model, simulated, choices, request)
        for replayer in simulation.denoisers.values():
            replayer._always_runs = True
        yield simulation
    finally:
        use_cards([])


# what is kept


def allocated_at_calls(model: str, denoiser: str, cache: dict[str, Any] | None, request: Request) -> list[int]:
    """Bytes that the allocator has handed out, as requested, whenever the denoiser is called."""
    found: list[int] = []
    card = roomy_card()
    choices = {"components": {denoiser: {"cache": cache, "placement": "offload"}}}
    with run_on(model, card, choices, request) as simulation:
        forward = simulation.components[denoiser].forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            free_dead_tensors()
            found.append(simulation.card.allocator.requested.now)
            return forward(*args, **kwargs)

        watched.__wrapped__ = forward  # type: ignore[attr-defined]  # pipelines look at its signature
        simulation.components[denoiser].forward = watched  # type: ignore[method-assign]
        simulation.run({"output_type": "latent"})
    return found


def roomy_card() -> Accelerator:
    """A card that has room for whatever is kept: for `pab` of Wan 14B at 720p that is over 100 GiB."""
    return known_card(CARD).model_copy(update={"bytes": ROOM})


def kept_rows(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    card, request = roomy_card(), Request(steps=STEPS)
    denoiser = "unet" if model == "sdxl" else "transformer"
    without: list[int] = []
    for strategy, kind in STRATEGIES.items():
        if model == "sdxl" and strategy in FOR_TRANSFORMERS:
            continue
        key = f"kept: {model}, {strategy}"
        if (yield key, {}) is not None:  # it is known
            continue
        without = without or allocated_at_calls(model, denoiser, None, request)
        fields = {"strategy": strategy} | ({} if kind.lossless else {"skipped_steps": SKIPPED})
        fields |= SETTINGS.get(strategy, {})
        footprint, plan = planned(model, card, request, StepCache.of(fields), None)
        (predicted,) = footprint.kept
        within = allocated_at_calls(model, denoiser, fields, request)
        measured = max(have - had for have, had in zip(within, without, strict=True))
        (said,) = (reason for reason in plan.reasons if f"step cache {strategy}" in reason.decision)
        yield key, {
            "model": model, "strategy": strategy, "predicted": predicted.device_bytes, "measured": measured,
            "said": f"{said.decision}: {said.because}",
        }  # fmt: skip


# what streams


class Transfers:
    """Transfers of one component's weights, each for the call that uses what it brought."""

    def __init__(self) -> None:
        self.by_call: Counter[int] = Counter()  # bytes
        self.call = -1
        self.resident = self.in_vain = 0
        self._waiting: dict[WeightGroup, int] = {}

    @contextmanager
    def of(self, streamer: Streamer) -> Iterator[None]:
        send, need, release = streamer._send, streamer._need, streamer._release

        def sent(here: LoadedGroup, after: Any) -> None:
            send(here, after)
            if here.group in streamer._resident:
                self.resident += here.group.size
            else:
                self._waiting[here.group] = here.group.size

        def needed(group: WeightGroup) -> None:
            need(group)
            self.by_call[self.call] += self._waiting.pop(group, 0)

        def released(group: WeightGroup) -> None:
            self.in_vain += self._waiting.pop(group, 0)
            release(group)

        vars(streamer).update(_send=sent, _need=needed, _release=released)
        try:
            yield
        finally:
            for name in ("_send", "_need", "_release"):
                del vars(streamer)[name]
            self.in_vain += sum(self._waiting.values())


def streaming_row(model: str, card_name: str, fields: dict[str, Any] | None, asked: dict[str, Any]) -> dict[str, Any]:
    cache = None if fields is None else StepCache.of(fields)
    card, request = known_card(card_name), Request(steps=STEPS, **asked)
    footprint, plan = planned(model, card, request, cache, BUDGET)
    assert plan.budget is not None
    limited = card.model_copy(update={"bytes": plan.budget.device})
    transfers, seconds, bytes_in, skips = Transfers(), [], [], []
    with run_on(model, limited, plan.model_dump(mode="json", exclude={"device"}), request) as simulation:
        (denoiser,) = simulation.denoisers
        part = simulation.components[denoiser]
        forward = part.forward
        streamer = simulation.fitted.session._places.of(denoiser)._streamers[denoiser]
        kept = simulation.fitted.session.caches.get(denoiser)

        def watched(*args: Any, **kwargs: Any) -> Any:
            transfers.call += 1
            began, before = simulation.card.now, simulation.card.bytes_in
            output = forward(*args, **kwargs)
            seconds.append((simulation.card.now - began) * 1e-9)
            bytes_in.append(simulation.card.bytes_in - before)
            skips.append(kept is not None and any(each.skipped_last for each in kept._branches.values()))
            return output

        watched.__wrapped__ = forward  # type: ignore[attr-defined]
        part.forward = watched
        with transfers.of(streamer):
            simulation.run()
        trace = simulation.fitted.report().trace
    phase = next(each for each in trace.phases if each.name == "denoise")
    predicted = next(each for each in plan.forecast if each.name == "denoise")
    chosen = streamer_plan(footprint, plan, denoiser)
    traced = next(iter(trace.caches), None)
    skipped = set(traced.skipped_steps) if traced else set[int]()
    calls_per_step = len(seconds) // STEPS
    left = [call for call in range(len(seconds)) if call // calls_per_step in skipped]
    return {
        "model": model, "card": card_name, "cache": "" if cache is None else cache.described, "steps": STEPS,
        "request": request.described, "calls_per_step": calls_per_step, "skipped": sorted(skipped),
        "predicted_seconds": predicted.seconds, "seconds": phase.seconds,
        "expected_in_skipped": chosen["skipped"], "in_skipped": [transfers.by_call[call] for call in left],
        "expected_in_others": chosen["others"],
        "in_others": [transfers.by_call[call] for call in range(1, len(seconds)) if call not in left],
        "resident": transfers.resident, "in_vain": transfers.in_vain, "bytes_in": phase.bytes_in,
        "loaded_in_vain": traced.loaded_in_vain if traced else 0, "kept": traced.device_bytes if traced else 0,
        "counted": sum(transfers.by_call.values()) + transfers.resident + transfers.in_vain,
        "ring": plan.components[denoiser].ring_buffer, "call_seconds": seconds, "on_demand": phase.on_demand,
        "predicted_peak": max(each.peak_bytes for each in plan.forecast), "peak": trace.peak_bytes,
        "notes": list(trace.notes),
    }  # fmt: skip


def streamer_plan(footprint: Footprint, plan: Plan, denoiser: str) -> dict[str, int | None]:
    """Bytes of the layers that run and are not resident in a call, by the footprint and the plan: skipped, or not."""
    component = next(each for each in footprint.components if each.name == denoiser)
    chosen = plan.components[denoiser]
    groups = group_layers(component, chosen.granularity or "layer")
    sizes = {layer.name: layer.bytes for layer in component.layers}
    resident = set(chosen.resident_layers or ())
    passing = {group: sum(sizes[each] for each in layers) for group, layers in groups.items() if group not in resident}
    found: dict[str, int | None] = {"skipped": None, "others": None}
    for phase in footprint.phases:
        for call in phase.calls:
            if call.component == denoiser:
                used = {each.layer for use in call.block_uses for each in use.layer_work}
                kind = "others" if call.left_out_from is None else "skipped"
                found[kind] = sum(size for name, size in passing.items() if not used.isdisjoint(groups[name]))
    return found


def streaming_rows(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for card in STREAMING_CARDS:
        for name, fields in CACHES.items():
            key = f"streaming: {model}, {card}, {name}"
            if (yield key, {}) is None:
                yield key, streaming_row(model, card, fields, STREAMED[model])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--only", default="kept,streaming")
    options.add_argument("--models", default=",".join(dict.fromkeys((*KEPT_MODELS, *STREAMED))))
    options.add_argument("--again", action="store_true", help="also rows that are written already")
    chosen = options.parse_args()
    file = RESULTS / f"{NAME}.json"
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() else {}
    models = chosen.models.split(",")
    parts = {"kept": (KEPT_MODELS, kept_rows), "streaming": (tuple(STREAMED), streaming_rows)}
    for part in chosen.only.split(","):
        known_to, rows_of = parts[part]
        for model in (each for each in models if each in known_to):
            generator = rows_of(model)
            try:
                key, row = next(generator)
                while True:
                    if row:
                        rows[key] = row
                        write(NAME, {"rows": rows})
                        print(key, row, flush=True)
                        key, row = next(generator)
                    else:
                        key, row = generator.send(rows.get(key) if not chosen.again else None)
            except StopIteration:
                pass


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
