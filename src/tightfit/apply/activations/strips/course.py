"""A graph and the bytes that strips may take → the course of a run: its stages, each in as few strips as fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.apply.activations.strips.peaks import Kept, Peak, peak_of
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.schedule import Step, make_schedule
from tightfit.apply.activations.strips.stages import Graph, Stage, find_stages
from tightfit.decisions import Maps

__all__ = ["Course", "find_course"]

FIRST = 5  # strips that tell what the others will take
PRICES = (math.inf, *(10 ** (-step / 4) for step in range(4, 25)), 0.0)  # bytes kept, for an operation not done again
WORTH = 0.98  # of the peak: more strips have to come below it, or they are not worth their overhead


@dataclass(frozen=True)
class Course:
    """Everything that is decided about a run of a program."""

    graph: Graph
    in_host: frozenset[int]  # what is kept in host memory
    stages: tuple[tuple[Stage, Sequence[Sequence[Step]]], ...]
    peak: Peak  # bytes beside weights and inputs, and what kernels hold for themselves

    @property
    def most_strips(self) -> int:
        return max(len(strips) for _, strips in self.stages)


def find_course(program: Program, working: int, maps: Maps) -> Course:
    """How to run `program` with at most `working` bytes for strips, beside what is kept between stages.

    Where even the smallest strips take more, less is held from strip to strip, and they are as small as helps. What is
    kept waits on the device, or in host memory; "again" keeps at most `working` bytes, where that can be, and computes
    the rest again. Stages can be formed as early as can be, or as the program does things: the less is done twice,
    then the lower the peak, the better.
    """
    best: list[_Draft] = []
    for sparing in (False, True):
        graphs = (Graph(program, in_order=in_order, sparing=sparing) for in_order in (False, True))
        best.append(min((_draft(graph, working, maps) for graph in graphs), key=_Draft.cost))
        if best[-1].fits:
            break
    return min(best, key=_Draft.cost).course()


@dataclass(frozen=True)
class _Draft:
    """Stages and in how many strips each is done, with the likely peak."""

    graph: Graph
    in_host: frozenset[int]
    stages: list[tuple[Stage, int]]
    peak: Peak
    fits: bool  # whether all strips take no more than they may

    def cost(self) -> tuple[int, Peak]:
        """How many operations of arithmetic it takes, about, and the peak."""
        done = (index for stage, _ in self.stages for index in stage.strips)
        return sum(self.graph.operations(index) for index in done if self.graph.heavy(index)), self.peak

    def course(self) -> Course:
        chosen, kept, most = [], Kept(Peak(0, 0), {}), Peak(0, 0)
        for stage, count in self.stages:
            strips = make_schedule(self.graph, stage, count)
            peak, kept = peak_of(self.graph, stage, strips, self.in_host, kept)
            chosen.append((stage, strips))
            most = most.higher(peak)
        return Course(self.graph, self.in_host, tuple(chosen), most)


def _draft(graph: Graph, working: int, maps: Maps) -> _Draft:
    stages = _stages_within(graph, working) if maps == "again" else find_stages(graph)
    movable = {index for stage in stages for index in stage.stores if not graph.needed_whole(index)}
    in_host = frozenset(movable if maps == "host" else ())
    chosen, kept, most, fits = [], Kept(Peak(0, 0), None), Peak(0, 0), True
    for stage in stages:
        before = kept
        count, peak, kept = _count(graph, stage, in_host, before, working)
        chosen.append((stage, count))
        most = most.higher(peak)
        fits &= peak.device <= max(before.bytes.device, kept.bytes.device) + working
    return _Draft(graph, in_host, chosen, most, fits)


def _stages_within(graph: Graph, most: int) -> list[Stage]:
    """Stages that keep at most `most` bytes between them, and do as little as can be again for it."""
    for price in PRICES:
        stages = find_stages(graph, price)
        if _most_kept(graph, stages) <= most:
            break
    return stages


def _most_kept(graph: Graph, stages: Sequence[Stage]) -> int:
    kept = most = 0
    for stage in stages:
        kept += sum(graph.program.nodes[index].bytes for index in stage.stores)
        kept -= sum(graph.program.nodes[index].bytes for index in stage.drops)
        most = max(most, kept)
    return most


def _count(graph: Graph, stage: Stage, in_host: frozenset[int], kept: Kept, working: int) -> tuple[int, Peak, Kept]:
    """In how few strips `stage` keeps within `working`; the likely peak, and what is kept after it."""
    rows = max((graph.program.nodes[index].rows for index in (*stage.strips, *stage.reads)), default=1)
    found, after = peak_of(graph, stage, make_schedule(graph, stage, 1), in_host, kept)
    most, count = max(kept.bytes.device, after.bytes.device) + working, 1
    while found.device > most and count < rows:
        # as if all above what is kept shrank with the strips; what does not shrink asks for another round
        more = max(count + 1, math.ceil(count * (found.device - most + working) / working))
        more = min(rows, more, 4 * count)
        likely = _likely_peak(graph, stage, more, in_host, kept, after)
        if likely.device > WORTH * found.device and more > 4:
            break
        count, found = more, likely
    return count, found, after


def _likely_peak(graph: Graph, stage: Stage, count: int, in_host: frozenset[int], kept: Kept, after: Kept) -> Peak:
    """The peak of `count` strips, by the first of them: from then on, what is made stands for what is given up."""
    strips = make_schedule(graph, stage, count, FIRST + 1)[:FIRST]
    peak, _ = peak_of(graph, stage, strips, in_host, kept)
    outputs = sum(graph.program.nodes[index].bytes for index in stage.outputs)  # there from the start
    (device, host), (least, least_host) = after.bytes, kept.bytes
    grown = max(0, device - least - outputs), max(0, host - least_host)
    return Peak(peak.device + grown[0], peak.host + grown[1])
