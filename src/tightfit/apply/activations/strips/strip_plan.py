"""A graph and a byte limit for strips → the strip plan of a run: its stages, each in as few strips as fit."""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.apply.activations.strips.memory_estimate import peak_of
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.schedule import (
    ScheduleStep,
    Share,
    Strips,
    StripSchedules,
    taken,
    whole,
)
from tightfit.apply.activations.strips.stages import Stage, StageGraph, find_stages
from tightfit.apply.activations.strips.strip_peaks import BoundaryState, StripPeak
from tightfit.measure.forked_work import in_parallel
from tightfit.schema.footprint import FeatureMaps
from tightfit.simulator.allocator_replay import ROUGH, least_capacity_of_moves

__all__ = ["PlannedStage", "StripPlan", "fewest_strips", "find_strip_plan", "peak_of_stages", "planned_stages_of"]

FIRST = 5  # strips whose peak stands for that of the others
PRICES = (math.inf, *(10 ** (-step / 4) for step in range(4, 25)), 0.0)  # bytes kept per operation not recomputed
FEWEST = 4  # fewest strips with which a stage's copies and its arithmetic overlap
MOST_STEPS = 20_000  # of a stage of one rank's rows: of longer ones, those of clips, planning would take minutes
WORTH = 0.98  # of the peak; more strips have to get below it to be worth their overhead


class PlannedStage(NamedTuple):
    """A stage in strips. With `ahead`, maps are sent to the host and fetched from it while strips are computed."""

    stage: Stage
    strips: Strips
    ahead: bool


@dataclass(frozen=True)
class StripPlan:
    """Everything that is decided about a run of a program."""

    graph: StageGraph
    in_host: frozenset[int]  # nodes kept in host memory
    passes: tuple[PlannedStage, ...]

    @functools.cached_property
    def peak(self) -> StripPeak:
        """Peak of a run. Only needed for planning, and to compare plans when memory runs out."""
        return peak_of_stages(self.graph, self.in_host, self.passes)

    def peak_and_allocator_bytes(self, *, expandable: bool = True) -> tuple[StripPeak, int]:
        """Return `peak`, and the bytes that an allocator needs on the device, with workspaces of kernels.

        With `expandable`, its segments are expandable.
        """
        moves = array("q")
        peak = peak_of_stages(self.graph, self.in_host, self.passes, moves)
        return peak, least_capacity_of_moves(moves, expandable=expandable, within=ROUGH)

    @property
    def most_strips(self) -> int:
        return max(len(strips) for _, strips, _ in self.passes)


def find_strip_plan(program: Program, working: int, maps: FeatureMaps) -> StripPlan:
    """Return how to run `program` with at most `working` bytes for strips, besides what is kept between stages.

    If even the smallest strips take more, they are as small as helps. Feature maps are kept on the device, or in host
    memory; "recompute" keeps at most `working` bytes, if possible, and recomputes the rest. Stages are formed as early
    as possible, or in the program's order, whichever costs less.
    """
    graphs = _graphs_of(program)
    drafts = in_parallel([functools.partial(_draft, graph, working, maps) for graph in graphs])
    for graph, draft in zip(graphs, drafts, strict=True):
        if maps != "recompute":  # if a copy of this process has drafted it, this one does not know its stages yet
            vars(graph).setdefault("stages", [stage for stage, *_ in draft.stages])
    graph, draft = min(zip(graphs, drafts, strict=True), key=lambda found: found[1].cost(found[0], working))
    return StripPlan(graph, draft.in_host, planned_stages_of(graph, draft.stages))


def _graphs_of(program: Program) -> list[StageGraph]:
    """Return a graph for each order in which stages can be formed; only one if both give the same stages."""
    if "graphs" not in program.derived:
        early, in_order = StageGraph(program), StageGraph(program, in_order=True)
        program.derived["graphs"] = [early] if early.level == in_order.level else [early, in_order]
    graphs: list[StageGraph] = program.derived["graphs"]
    return graphs


def planned_stages_of(graph: StageGraph, planned: Iterable[tuple[Stage, int, bool]]) -> tuple[PlannedStage, ...]:
    """Return stages with their strips; `planned` contains each stage, its number of strips and `ahead`."""
    return tuple(
        PlannedStage(stage, StripSchedules(graph, stage).strips(count), ahead) for stage, count, ahead in planned
    )


@dataclass(frozen=True)
class _Draft:
    """Stages of a graph, each with its number of strips and `ahead`, and the estimated peak."""

    in_host: frozenset[int]
    stages: list[tuple[Stage, int, bool]]
    peak: StripPeak

    def cost(self, graph: StageGraph, working: int) -> tuple[int, int, int, StripPeak]:
        """Return a sort key, the most important part first; lower is better.

        The approximate number of operations; by how many factors of 1.1 the peak exceeds `working` bytes; the bytes
        whose transfer is waited for; and the peak.
        """
        done = (index for stage, *_ in self.stages for index in stage.strips)
        operations = sum(graph.program.operations(index) for index in done if graph.is_compute(index))
        beyond = math.ceil(math.log(max(self.peak.device / working, 1), 1.1))
        waited_for = sum(self._waited_for(graph.program, stage, ahead) for stage, _, ahead in self.stages)
        return operations, beyond, waited_for, self.peak

    def _waited_for(self, program: Program, stage: Stage, ahead: bool) -> int:
        """Bytes copied to and from host memory in `stage`; with `ahead`, only the larger of the two."""
        nodes = program.nodes
        ways = [sum(nodes[i].bytes for i in self.in_host.intersection(way)) for way in (stage.reads, stage.stores)]
        return max(ways) if ahead else sum(ways)


def peak_of_stages(
    graph: StageGraph,
    in_host: frozenset[int],
    passes: Sequence[PlannedStage],
    moves: MutableSequence[int] | None = None,
) -> StripPeak:
    """Return the peak bytes of a run, without weights, inputs and workspaces of kernels.

    Allocations and frees on the device are appended to `moves`.
    """
    kept, most = BoundaryState(StripPeak(0, 0), {}), StripPeak(0, 0)
    following = [taken(stage, strips[0]) for stage, strips, _ in passes[1:]]
    for (stage, strips, ahead), first in zip(passes, [*following, {}], strict=True):
        peak, kept = peak_of(graph, stage, strips, in_host, kept, first, ahead=ahead, moves=moves)
        most = most.higher(peak)
    return most


def _draft(graph: StageGraph, working: int, maps: FeatureMaps) -> _Draft:
    stages = _stages_within(graph, working) if maps == "recompute" else graph.stages
    movable = {index for stage in stages for index in stage.stores if not graph.needed_whole(index)}
    in_host = frozenset(movable if maps == "host" else ())
    chosen, kept, most = [], BoundaryState(StripPeak(0, 0), None), StripPeak(0, 0)
    for stage in stages:
        schedules = StripSchedules(graph, stage)
        for ahead in (True, False) if in_host.intersection((*stage.reads, *stage.stores)) else (False,):
            count, peak, after = _count(graph, stage, schedules, in_host, kept, working, ahead=ahead)
            if peak.device <= max(kept.bytes.device, after.bytes.device) + working:
                break
        chosen.append((stage, count, ahead))
        most, kept = most.higher(peak), after
    return _Draft(in_host, chosen, most)


def _stages_within(graph: StageGraph, most: int) -> list[Stage]:
    """Return stages that keep at most `most` bytes between them, with as little recomputation as possible."""
    for price in PRICES:
        stages = find_stages(graph, price)
        if _most_kept(graph, stages) <= most:
            break
    return stages


def _most_kept(graph: StageGraph, stages: Sequence[Stage]) -> int:
    kept = most = 0
    for stage in stages:
        kept += sum(graph.program.nodes[index].bytes for index in stage.stores)
        kept -= sum(graph.program.nodes[index].bytes for index in stage.drops)
        most = max(most, kept)
    return most


def fewest_strips(graph: StageGraph, stage: Stage, working: int, share: Share) -> int:
    """Return the fewest strips of a `share` of the rows with which `stage` keeps within `working` bytes, all on the
    device and besides what is kept before or after it; if none does, as many as help, in at most MOST_STEPS steps.
    """
    unknown, most = BoundaryState(StripPeak(0, 0), None), max(MOST_STEPS // max(len(stage.strips), 1), 1)
    schedules = StripSchedules(graph, stage, share)
    count, *_ = _count(graph, stage, schedules, frozenset(), unknown, working, ahead=False, share=share, most=most)
    ways = [schedules.strips(each) for each in (1, count)]
    (at_once, after), (found, _) = (peak_of(graph, stage, way, frozenset(), unknown) for way in ways)
    kept = max(after.bytes.device, 0)
    return count if found.device - kept < WORTH * (at_once.device - kept) else 1


def _count(
    graph: StageGraph, stage: Stage, schedules: StripSchedules, in_host: frozenset[int], kept: BoundaryState,
    working: int, *, ahead: bool, share: Share = whole, most: int = sys.maxsize,
) -> tuple[int, StripPeak, BoundaryState]:  # fmt: skip
    """Return about the fewest strips with which `stage` keeps within `working`, the peak, and the final state.

    Up to a quarter more than the fewest if they repeat each other then; at most `most`.
    """

    def likely(count: int) -> StripPeak:
        first = schedules.strips(count, FIRST + 1)[:FIRST]
        return _likely_peak(graph, stage, first, in_host, kept, after, ahead=ahead)

    shares = (share(graph.program.nodes[index].rows) for index in (*stage.strips, *stage.reads))
    rows = min(max((hi - lo for lo, hi in shares), default=1), most)
    found, after = peak_of(graph, stage, schedules.strips(1), in_host, kept, ahead=ahead)
    enough, count = max(kept.bytes.device, after.bytes.device) + working, 1
    if ahead:
        count = min(rows, FEWEST)
        found = likely(count)
    while found.device > enough and count < rows:
        # assumes that all bytes above the kept ones shrink with the strips; otherwise the loop continues
        more = max(count + 1, math.ceil(count * (found.device - enough + working) / working))
        more = schedules.near(min(rows, more, 4 * count), rows)
        lower = likely(more)
        if lower.device > WORTH * found.device and more > 4:
            break
        count, found = more, lower
    last = {index: graph.program.nodes[index].bytes // count for index in in_host.intersection(stage.stores)}
    return count, found, after._replace(leaving=last if ahead else {}, coming={})


def _likely_peak(
    graph: StageGraph,
    stage: Stage,
    strips: Sequence[Sequence[ScheduleStep]],
    in_host: frozenset[int],
    kept: BoundaryState,
    after: BoundaryState,
    *,
    ahead: bool,
) -> StripPeak:
    """Estimate the peak of all strips by the first ones: later, stored rows replace rows that are freed."""
    peak, _ = peak_of(graph, stage, strips, in_host, kept, ahead=ahead)
    outputs = sum(graph.program.nodes[index].bytes for index in stage.outputs)  # allocated from the start
    (device, host), (least, least_host) = after.bytes, kept.bytes
    grown = max(0, device - least - outputs), max(0, host - least_host)
    return StripPeak(peak.device + grown[0], peak.host + grown[1])
