"""A graph and the bytes that strips may take → the course of a run: its stages, each in as few strips as fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.apply.activations.strips.peaks import Kept, Peak, peak_of, taken
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.schedule import Step, make_schedule
from tightfit.apply.activations.strips.stages import Graph, Stage, find_stages
from tightfit.decisions import Maps

__all__ = ["Course", "find_course"]

FIRST = 5  # strips that tell what the others will take
PRICES = (math.inf, *(10 ** (-step / 4) for step in range(4, 25)), 0.0)  # bytes kept, for an operation not done again
FEWEST = 4  # strips in which a stage's copies and its arithmetic overlap
WORTH = 0.98  # of the peak: more strips have to come below it, or they are not worth their overhead


@dataclass(frozen=True)
class Course:
    """Everything that is decided about a run of a program."""

    graph: Graph
    in_host: frozenset[int]  # what is kept in host memory
    ahead: bool  # whether copies there and back are under way while others are computed
    stages: tuple[tuple[Stage, Sequence[Sequence[Step]]], ...]
    peak: Peak  # bytes beside weights and inputs, and what kernels hold for themselves

    @property
    def most_strips(self) -> int:
        return max(len(strips) for _, strips in self.stages)


def find_course(program: Program, working: int, maps: Maps) -> Course:
    """How to run `program` with at most `working` bytes for strips, beside what is kept between stages.

    Where even the smallest strips take more, they are as small as helps. What is kept waits on the device, or in host
    memory; "again" keeps at most `working` bytes, where that can be, and computes the rest again. Stages can be formed
    as early as can be, or as the program does things: the less is done twice, then the lower the peak, the better.
    """
    graphs = [Graph(program), Graph(program, in_order=True)]
    if graphs[0].level == graphs[1].level:
        del graphs[1]
    if maps == "host":
        draft = min((_draft(graph, working, maps, ahead=True) for graph in graphs), key=_Draft.cost)
        if draft.fits:
            return draft.course()
    return min((_draft(graph, working, maps) for graph in graphs), key=_Draft.cost).course()


@dataclass(frozen=True)
class _Draft:
    """Stages and in how many strips each is done, with the likely peak."""

    graph: Graph
    in_host: frozenset[int]
    ahead: bool
    stages: list[tuple[Stage, int]]
    peak: Peak
    fits: bool  # whether all strips take no more than they may

    def cost(self) -> tuple[int, int, Peak]:
        """How many operations of arithmetic it takes, about, the bytes that it waits for, and the peak."""
        done = (index for stage, _ in self.stages for index in stage.strips)
        operations = sum(self.graph.operations(index) for index in done if self.graph.heavy(index))
        return operations, sum(self._moved(stage) for stage, _ in self.stages) if self.ahead else 0, self.peak

    def _moved(self, stage: Stage) -> int:
        """Bytes to host memory or from there while `stage` is done: the more, as both ways are used at once."""
        nodes = self.graph.program.nodes
        return max(sum(nodes[i].bytes for i in self.in_host.intersection(way)) for way in (stage.reads, stage.stores))

    def course(self) -> Course:
        kept, most = Kept(Peak(0, 0), {}), Peak(0, 0)
        stages = [(stage, make_schedule(self.graph, stage, count)) for stage, count in self.stages]
        firsts = [taken(stage, strips[0]) for stage, strips in stages]
        for (stage, strips), following in zip(stages, [*firsts[1:], {}], strict=True):
            peak, kept = peak_of(self.graph, stage, strips, self.in_host, kept, following, ahead=self.ahead)
            most = most.higher(peak)
        return Course(self.graph, self.in_host, self.ahead, tuple(stages), most)


def _draft(graph: Graph, working: int, maps: Maps, *, ahead: bool = False) -> _Draft:
    stages = _stages_within(graph, working) if maps == "again" else find_stages(graph)
    movable = {index for stage in stages for index in stage.stores if not graph.needed_whole(index)}
    in_host = frozenset(movable if maps == "host" else ())
    chosen, kept, most, fits = [], Kept(Peak(0, 0), None), Peak(0, 0), True
    for stage in stages:
        before = kept.bytes.device
        count, peak, kept = _count(graph, stage, in_host, kept, working, ahead=ahead)
        chosen.append((stage, count))
        most = most.higher(peak)
        fits &= peak.device <= max(before, kept.bytes.device) + working
    return _Draft(graph, in_host, ahead, chosen, most, fits)


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


def _count(
    graph: Graph, stage: Stage, in_host: frozenset[int], kept: Kept, working: int, *, ahead: bool
) -> tuple[int, Peak, Kept]:
    """In how few strips `stage` keeps within `working`; the likely peak, and what is kept after it."""
    rows = max((graph.program.nodes[index].rows for index in (*stage.strips, *stage.reads)), default=1)
    found, after = peak_of(graph, stage, make_schedule(graph, stage, 1), in_host, kept, ahead=ahead)
    most, count = max(kept.bytes.device, after.bytes.device) + working, 1
    if ahead and not in_host.isdisjoint((*stage.reads, *stage.stores)):
        count = min(rows, FEWEST)
        found = _likely_peak(graph, stage, count, in_host, kept, after, ahead=ahead)
    while found.device > most and count < rows:
        # as if all above what is kept shrank with the strips; what does not shrink asks for another round
        more = max(count + 1, math.ceil(count * (found.device - most + working) / working))
        more = min(rows, more, 4 * count)
        likely = _likely_peak(graph, stage, more, in_host, kept, after, ahead=ahead)
        if likely.device > WORTH * found.device and more > 4:
            break
        count, found = more, likely
    last = {index: graph.program.nodes[index].bytes // count for index in in_host.intersection(stage.stores)}
    return count, found, after._replace(leaving=last if ahead else {}, coming={})


def _likely_peak(
    graph: Graph, stage: Stage, count: int, in_host: frozenset[int], kept: Kept, after: Kept, *, ahead: bool
) -> Peak:
    """The peak of `count` strips, by the first of them: from then on, what is made stands for what is given up."""
    strips = make_schedule(graph, stage, count, FIRST + 1)[:FIRST]
    peak, _ = peak_of(graph, stage, strips, in_host, kept, ahead=ahead)
    outputs = sum(graph.program.nodes[index].bytes for index in stage.outputs)  # there from the start
    (device, host), (least, least_host) = after.bytes, kept.bytes
    grown = max(0, device - least - outputs), max(0, host - least_host)
    return Peak(peak.device + grown[0], peak.host + grown[1])
