"""What torch's allocator did in calls, from its recorded history, and what the simulated allocator reserves for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gpu_report_steps.card import this_card
from gpu_report_steps.plan import Step
from gpu_report_steps.records import Record, Row
from gpu_report_steps.stub import small_values_if_stub, weighted
from tightfit import fit
from tightfit.catalog.known import known_model
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.simulator.allocator import CachingAllocator, CardFull
from tightfit.simulator.blocks import Block

__all__ = ["replay_trace", "replayed"]

GB = 10**9
Trace = list[dict[str, Any]]
HISTORIES: dict[str, dict[str, Any]] = {
    "level 0": {"level": 0},
    "level 3": {"level": 3},
    "2 GB": {"budget": 2 * GB},
}
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _Passed:
    """An event that is complete: the recorded history says itself when a block could be used again."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@contextlib.contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Fill `trace` with what the allocator does in the block, and with each release of its cache."""
    release, marks = torch.cuda.empty_cache, list[int]()

    def events() -> Trace:
        found: Trace = torch.cuda.memory._snapshot()["device_traces"][0]
        return found

    def empty_cache() -> None:
        marks.append(len(events()))
        release()

    torch.cuda.memory._record_memory_history(context=None)
    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache
    try:
        yield
        found = events()
    finally:
        torch.cuda.empty_cache = torch.cuda.memory.empty_cache = release
        torch.cuda.memory._record_memory_history(enabled=None)
    for number, event in enumerate(found):
        trace.extend({"action": "empty_cache"} for mark in marks if mark == number)
        trace.append(event)


def replay_trace(trace: Trace, capacity: int, *, expandable: bool) -> Row:
    """Reserved bytes after each allocation by torch's allocator and by the simulated one."""
    total = 2**50
    simulated = CachingAllocator(total, lambda stream: _Passed(), expandable=expandable, keep=False)
    simulated.capacity = capacity
    streams, blocks, reserved, peak = dict[int, int](), dict[int, Block](), 0, 0
    mallocs, differing, first, off = 0, 0, None, 0
    for number, event in enumerate(trace):
        match event["action"]:
            case "alloc":
                stream = streams.setdefault(event["stream"], len(streams))
                try:
                    blocks[event["addr"]] = simulated.malloc(event["size"], stream)
                except CardFull:
                    return {"mallocs": mallocs, "refused": number, "reserved": reserved, "capacity": capacity}
                mallocs += 1
                peak = max(peak, reserved)
                if simulated.reserved.now != reserved:
                    differing += 1
                    off = max(off, abs(simulated.reserved.now - reserved))
                    first = number if first is None else first
            case "free_completed":
                if event["addr"] in blocks:
                    simulated.free(blocks.pop(event["addr"]))
            case "empty_cache":
                simulated.empty_cache()
            case action if action in SEGMENTS:
                reserved += SEGMENTS[action] * event["size"]
    found = {"mallocs": mallocs, "reserved": peak, "simulated": simulated.reserved.peak, "streams": len(streams)}
    return found | {"differing": differing, "largest_difference": off, "first": first}


def replayed(record: Record, step: Step) -> None:
    from gpu_report_steps.isolated import in_own_process

    this_card()  # measured before, if no rates are kept
    for about in record.missing([{"history": name} for name in HISTORIES]):
        record.add(**about, **in_own_process(_history, about["history"]))


def _history(name: str) -> Row:
    """One call of Stable Diffusion 1.5, recorded from before its weights are placed on the card."""
    pipe, trace, chosen = weighted("sd-1.5"), Trace(), HISTORIES[name]
    asked = known_model("sd-1.5").request.model_copy(update={"steps": 2})
    this_card()
    torch.cuda.init()
    torch.cuda.empty_cache()
    with recording(trace):
        fitted = fit(pipe, device="cuda", request=asked, **chosen)
        with small_values_if_stub():
            pipe(**call_arguments(pipe, Prompt("a prompt", seed=0), asked), output_type="pt")
        expandable = fitted.plan.expandable_segments
        share = torch.cuda.get_per_process_memory_fraction(0)
    capacity = int(share * torch.cuda.get_device_properties(0).total_memory)
    return replay_trace(trace, capacity, expandable=expandable)
