"""A known model's usual request under the levels 0–3, rehearsed on a card without end → what each needs of a card.

A level's plan lets segments of the allocator be fixed and its autoencoder blend tiles, of which a footprint knows
nothing: what it needs is what the allocation history of a rehearsal needs, as `tightfit plan --level` finds it.
"""

from __future__ import annotations

from tightfit.catalog.known import known_model
from tightfit.chart import Preset
from tightfit.plan.cells import host_bytes
from tightfit.records import Accelerator, Footprint, Request
from tightfit.run.predictions import remembered

__all__ = ["LEVELS", "simulated_preset"]

LEVELS = (0, 1, 2, 3)


def simulated_preset(model: str, level: int, footprint: Footprint, accelerator: Accelerator) -> Preset:
    """`level` of `model`, whose usual request has `footprint`, on a card like `accelerator`. The answer is kept."""
    endless = accelerator.model_copy(update={"bytes": 2**60})
    question = {"model": model, "level": level, "card": endless.to_mapping()}
    usual = known_model(model).request
    return remembered(Preset, question, lambda: _rehearsed(model, level, footprint, endless, usual))


def _rehearsed(model: str, level: int, footprint: Footprint, accelerator: Accelerator, asked: Request) -> Preset:
    from tightfit.pretend.history import least_capacity
    from tightfit.run.stage import SimulationRun, roomy_card

    with roomy_card(accelerator) as card:
        stage = SimulationRun(model, card, {"level": level}, asked)
        stage.play()
        plan, trace = stage.fitted.plan, stage.fitted.report().trace
        return Preset(
            level=level,
            needed_bytes=least_capacity(card.allocator.history, expandable=plan.expandable_segments),
            host_bytes=host_bytes(plan, footprint),
            seconds=trace.seconds if accelerator.memory_rate else None,
        )
