"""Calls while torch's allocator may have no more than a cap: tightfit's and others', by bench/rivals_gpu.py.

Each call is made in a process forked from one that has the weights in RAM and has not touched the card.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from gpu_report_steps.plan import CONTENDERS, Step
from gpu_report_steps.records import Record, Row
from gpu_report_steps.stub import small_values_if_stub, weighted
from rivals_contenders import OURS, SMALLER
from rivals_gpu import forked, ours, rival
from tightfit import measure_footprint
from tightfit.catalog.known import known_model
from tightfit.run.planning_context import measured_machine
from tightfit.schema.request import Request

__all__ = ["known_from", "own", "rivals"]

GB = 10**9
STEPS = 3  # of denoising, of one call: the first is not part of a step's time
ALONE = 150.0  # seconds that one call may take
SIZELESS = [name for name in CONTENDERS if name.startswith("diffusers:")]  # a card's size is nothing to them


def own(record: Record, step: Step) -> None:
    wanted = [{"contender": OURS, "cap": cap} for cap in step.caps]
    if any(record.missing(wanted)):
        forked(lambda: {"rated": bool(measured_machine())}, ALONE)  # once, on a card that nothing uses
        asked = request_of(step.model)
        footprint = measure_footprint(step.model, asked)
        pipe = weighted(step.model)
        for about in record.missing(wanted):
            act = functools.partial(ours, pipe, footprint, asked, about["cap"] * GB)
            record.add(**about, model=step.model, request=asked.described, **_called(act))


def rivals(record: Record, step: Step) -> None:
    caps = sorted(step.caps, reverse=True)
    wanted: list[Row] = [{"contender": name, "cap": cap} for name in CONTENDERS for cap in caps]
    pipe, asked = weighted(step.model), request_of(step.model)
    for about in record.missing(wanted):
        name, cap = about["contender"], about["cap"]
        larger = next((record.find(contender=name, cap=each) for each in reversed(caps) if each > cap), None)
        row = known_from(larger, name, cap * GB)
        for tiles in (False, True):
            if row is None or (row.get("failed") == "decoding" and not row.get("tiles")):
                act = functools.partial(rival, pipe, name, asked, cap * GB, tiles=tiles)
                row = _called(act) | {"tiles": tiles}
        record.add(**about, model=step.model, request=asked.described, **(row or {}))


def request_of(model: str) -> Request:
    """What is asked for under caps: of a video the smaller one, to stay within a step's minutes."""
    usual = known_model(model).request
    return usual.model_copy(update=SMALLER.get(model, {}) if usual.frames else {})


def known_from(larger: Row | None, name: str, size: int) -> Row | None:
    """What needs no run: the result under the next larger cap, of a contender to which a card's size is nothing.

    It failed there, or took no more than `size` bytes.
    """
    if larger is None or name not in SIZELESS or "stopped" in str(larger.get("failed")):
        return None
    if "failed" not in larger and larger["peak"] > size:
        return None
    kept = {key: value for key, value in larger.items() if key not in ("contender", "cap", "model", "request")}
    return kept | {"from_cap": larger.get("from_cap", larger["cap"])}


def _called(act: Callable[..., Row]) -> dict[str, Any]:
    def call() -> Row:
        sys.modules.pop("torchao", None)  # this process may open the card
        with small_values_if_stub():
            return act(cuda=True, steps=STEPS, times=1)

    return forked(call, ALONE)
