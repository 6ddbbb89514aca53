"""A graph and the bytes that strips may take → the course of a run: its stages, each in as few strips as fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.schedule import Keeping, Peak, Step, make_schedule, peak_of
from tightfit.apply.activations.strips.stages import Graph, Stage, find_stages

__all__ = ["Course", "Maps", "find_course"]

Maps = Literal["device", "host", "again"]
WORTH = 0.98  # of the peak: more strips have to come below it, or they are not worth their overhead


@dataclass(frozen=True)
class Course:
    """Everything that is decided about a run of a program."""

    graph: Graph
    keeping: Keeping
    stages: tuple[tuple[Stage, Sequence[Sequence[Step]]], ...]
    peak: Peak  # bytes beside weights and inputs, and what kernels hold for themselves

    @property
    def most_strips(self) -> int:
        return max(len(strips) for _, strips in self.stages)


def find_course(program: Program, working: int, maps: Maps) -> Course:
    """How to run `program` with at most `working` bytes for strips, beside what is kept between stages.

    Where even the smallest strips take more, they are as small as they can be. What is kept waits on the device, or in
    host memory; "again" keeps as little as can be and computes the rest again. Of the two orders in which stages can
    be formed, as early as can be or as the program does them, the one with the lower peak is taken.
    """
    courses = [_course(Graph(program, in_order=in_order), working, maps) for in_order in (False, True)]
    return min(courses, key=lambda course: (course.peak.device, course.peak.host))


def _course(graph: Graph, working: int, maps: Maps) -> Course:
    stages = find_stages(graph, 0.0 if maps == "again" else math.inf)
    movable = {index for stage in stages for index in stage.stores if not graph.needed_whole(index)}
    keeping = Keeping(frozenset(movable) if maps == "host" else frozenset())
    chosen, kept, most = [], Peak(0, 0), Peak(0, 0)
    for stage in stages:
        strips, peak, kept = _strips(graph, stage, keeping, kept, working)
        chosen.append((stage, strips))
        most = Peak(max(most.device, peak.device), max(most.host, peak.host))
    return Course(graph, keeping, tuple(chosen), most)


def _strips(
    graph: Graph, stage: Stage, keeping: Keeping, kept: Peak, working: int
) -> tuple[Sequence[Sequence[Step]], Peak, Peak]:
    """As few strips as keep within `working`; their peak, and what is kept after them."""
    rows = max((graph.program.nodes[index].rows for index in (*stage.strips, *stage.reads)), default=1)

    def attempt(count: int) -> tuple[Sequence[Sequence[Step]], Peak, Peak]:
        strips = make_schedule(graph, stage, count)
        return strips, *peak_of(graph, stage, strips, keeping, kept)

    count, found = 1, attempt(1)
    floor = max(kept.device, found[2].device)
    while found[1].device > floor + working and count < rows:
        # as if all above the floor shrank with the strips; what does not shrink asks for another round
        more = math.ceil(count * (found[1].device - floor) / working) if working else rows
        finer = attempt(min(rows, max(more, count + 1), 4 * count))
        if count > 1 and finer[1].device > WORTH * found[1].device:
            return found
        count, found = len(finer[0]), finer
    return found
