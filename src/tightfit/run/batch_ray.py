"""A batch on a Ray cluster: workers are placed by predicted bytes; requests of a lost worker are done again."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from tightfit.errors import InputError, RunError
from tightfit.run.batch import BatchWriter
from tightfit.run.batch_lines import BatchRequest
from tightfit.run.batch_placement import Placement, RequestGroup, place_workers
from tightfit.run.batch_worker import BatchWorker, predict_peaks
from tightfit.run.drawer import Failure, planned_request
from tightfit.run.ray_cluster import BYTES, OfferedNode, connected, offered_nodes
from tightfit.run.run_target import RunOptions
from tightfit.schema.request import Request
from tightfit.units import format_bytes

__all__ = ["RayCluster"]

logger = logging.getLogger("tightfit")

MOST_LOSSES = 3  # workers that one request, or one node without a result in between, may lose
LOOK = 2.0  # seconds between two looks at the nodes
PATIENCE = 60.0  # seconds to wait for a node where none is left


class RayCluster:
    """Draws batches on the cluster at `address`; None: on one of this computer, for that time."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def draw(
        self, model: str | None, options: RunOptions, requests: Sequence[BatchRequest], writer: BatchWriter
    ) -> None:
        """Draw `requests`, in any order, and hand each result to `writer`. Raises what prevents all of them."""
        writer.started("connecting")
        with connected(self._address, options) as ray:
            _Run(ray, model, options, requests, writer).to_the_end()


@dataclass(eq=False)
class _Worker:
    """An actor, and what it does."""

    actor: Any
    host: str
    placement: Placement
    waiting_for: Any = None  # reference to what it does; None: it is idle
    asked: BatchRequest | None = None  # what it draws; None: it is started, or idle
    last: Request | None = None  # the kind of request that its pipeline is planned for


@dataclass(eq=False)
class _PlannedNode:
    """A node, and what requests need on it."""

    offered: OfferedNode
    waiting_for: Any = None  # reference to its predictions; None: they are there
    peaks: dict[Request, int] = field(default_factory=dict)
    failures: dict[Request, Failure] = field(default_factory=dict)
    unusable: str | None = None
    losses: int = 0  # workers lost since its last result


class _Run:
    """One batch on a cluster."""

    def __init__(
        self, ray: Any, model: str | None, options: RunOptions, requests: Sequence[BatchRequest], writer: BatchWriter
    ) -> None:
        self._ray, self._writer = ray, writer
        self._model, self._options = model, options
        self._pending: dict[Request, deque[BatchRequest]] = defaultdict(deque)
        for asked in requests:
            self._pending[planned_request(asked)].append(asked)
        self._kinds = list(self._pending)
        self._nodes: dict[str, _PlannedNode] = {}
        self._workers: list[_Worker] = []
        self._losses: Counter[str] = Counter()  # by the name of the request
        self._looked = self._had_nodes = -PATIENCE

    def to_the_end(self) -> None:
        """Draw all requests. RunError or InputError if no node can."""
        self._had_nodes = time.monotonic()
        while any(self._pending.values()) or any(worker.asked for worker in self._workers):
            self._look_at_nodes()
            self._refuse_what_fits_nowhere()
            self._assign()
            self._start_workers()
            self._collect()

    # nodes

    def _look_at_nodes(self) -> None:
        """Let new nodes predict, and forget those that are gone."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        alive = {node.node: node for node in offered_nodes(self._ray.nodes(), self._options)}
        for name in set(self._nodes) - set(alive):
            del self._nodes[name]
        for name, offered in alive.items():
            if name not in self._nodes:
                self._writer.started("planning")
                task = self._on(name, predict_peaks, num_gpus=offered.cards_each, max_calls=1, max_retries=2)
                reference = task.remote(self._model, self._options, self._kinds)
                self._nodes[name] = _PlannedNode(offered, waiting_for=reference)
        if any(node.unusable is None for node in self._nodes.values()):
            self._had_nodes = time.monotonic()
        else:
            self._give_up_without_nodes()

    def _on(self, node: str, what: Any, **options: Any) -> Any:
        """A task or an actor's class that runs on `node`, and on no other."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._ray.remote(num_cpus=1, scheduling_strategy=strategy, **options)(what)

    def _give_up_without_nodes(self) -> None:
        """Raise why no node can draw anything, once there has been time for another one to appear."""
        reasons = [f"{node.offered.host}: {node.unusable}" for node in self._nodes.values()]
        if not reasons and not self._writer.drawn and not self._losses:
            raise InputError(
                f"no node of the cluster offers {BYTES} (and the device): start each with its device's bytes, "
                f"ray start --resources '{{\"{BYTES}\": 24000000000}}'",
                resource=BYTES,
            )
        if reasons or time.monotonic() - self._had_nodes > PATIENCE:
            said = "; ".join(reasons) or f"all nodes that offer {BYTES} are gone"
            raise RunError(f"no node of the cluster can go on: {said}", nodes=len(self._nodes))

    def _predicted(self, node: _PlannedNode, reference: Any) -> None:
        node.waiting_for = None
        try:
            found = self._ray.get(reference)
        except Exception as error:  # what the node raised, or that it is gone
            cause = getattr(error, "cause", None) or error
            node.unusable = " ".join(str(cause).split())
        else:
            if found.version != version("tightfit"):
                node.unusable = f"it has tightfit {found.version}, not {version('tightfit')}"
            for kind, peak in zip(self._kinds, found.peaks, strict=True):
                if isinstance(peak, Failure):
                    node.failures[kind] = peak
                else:
                    node.peaks[kind] = max(peak, 1)
        if node.unusable is not None:
            self._note(f"{node.offered.host} is not used: {node.unusable}")

    def _refuse_what_fits_nowhere(self) -> None:
        """Record a failure for each request that no node can run, once all have predicted."""
        usable = [node for node in self._nodes.values() if node.unusable is None]
        if not usable or any(node.waiting_for is not None for node in usable):
            return
        for kind, waiting in self._pending.items():
            if waiting and not any(self._could_run(node, kind) for node in usable):
                failure = _refusal(kind, usable)
                while waiting:
                    self._writer.finished(waiting.popleft(), failure)

    def _could_run(self, node: _PlannedNode, kind: Request) -> bool:
        return kind in node.peaks and node.offered.left(()).holds(node.peaks[kind])

    # workers

    def _start_workers(self) -> None:
        usable = {
            name: node for name, node in self._nodes.items() if node.unusable is None and node.waiting_for is None
        }
        placed = [worker.placement for worker in self._workers]
        nodes = [node.offered.left(placed) for node in usable.values()]
        groups = [
            RequestGroup(len(waiting), {name: node.peaks[kind] for name, node in usable.items() if kind in node.peaks})
            for kind, waiting in self._pending.items()
            if waiting
        ]
        spare = [worker.placement for worker in self._workers if worker.asked is None]
        for placement in place_workers(nodes, groups, spare):
            cards = usable[placement.node].offered.cards_each
            kind = self._on(
                placement.node, BatchWorker, num_gpus=cards, resources={BYTES: placement.bytes}, max_restarts=0
            )
            actor = kind.remote(self._model, self._options)
            self._workers.append(
                _Worker(actor, usable[placement.node].offered.host, placement, waiting_for=actor.ready.remote())
            )
            logger.info("starting a worker with %s", format_bytes(placement.bytes))

    def _assign(self) -> None:
        """Give idle workers the largest requests that they can run, like the last one if possible; stop the others."""
        for worker in [worker for worker in self._workers if worker.waiting_for is None]:
            kind = self._kind_for(worker)
            if kind is None:
                self._stop(worker)
                continue
            worker.asked, worker.last = self._pending[kind].popleft(), kind
            worker.waiting_for = worker.actor.draw.remote(worker.asked)

    def _kind_for(self, worker: _Worker) -> Request | None:
        node = self._nodes.get(worker.placement.node)
        peaks = node.peaks if node is not None else {}
        able = [
            kind
            for kind, waiting in self._pending.items()
            if waiting and kind in peaks and peaks[kind] <= worker.placement.bytes
        ]
        return worker.last if worker.last in able else max(able, key=lambda kind: peaks[kind], default=None)

    def _stop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)

    def _collect(self) -> None:
        """Wait a moment for results, and take those that are there."""
        busy = [worker for worker in self._workers if worker.waiting_for is not None]
        doing = {worker.waiting_for: functools.partial(self._ended, worker) for worker in busy}
        for node in self._nodes.values():
            if node.waiting_for is not None:
                doing[node.waiting_for] = functools.partial(self._predicted, node)
        if not doing:
            time.sleep(LOOK / 10)
            return
        ready, _ = self._ray.wait(list(doing), num_returns=1, timeout=LOOK)
        for reference in ready:
            doing[reference](reference)

    def _ended(self, worker: _Worker, reference: Any) -> None:
        """Take what a worker did: it was started, it drew a request, or it is lost."""
        asked, worker.asked, worker.waiting_for = worker.asked, None, None
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # raised outside of what a worker catches
            result = Failure(type(error.cause).__name__, " ".join(str(error.cause).split()))
        except self._ray.exceptions.RayError as error:
            self._lost(worker, asked, error)
            return
        if asked is not None:
            self._writer.finished(asked, result)
            if node := self._nodes.get(worker.placement.node):
                node.losses = 0

    def _lost(self, worker: _Worker, asked: BatchRequest | None, error: Exception) -> None:
        """Do the request of a lost worker again, but for those that lose one worker after another."""
        self._stop(worker)
        node = self._nodes.get(worker.placement.node)
        self._note(f"a worker on {worker.host} was lost{f' at {asked.name}' if asked else ''} ({type(error).__name__})")
        if asked is not None:
            self._losses[asked.name] += 1
            if self._losses[asked.name] < MOST_LOSSES:
                self._pending[planned_request(asked)].appendleft(asked)
            else:
                said = f"{MOST_LOSSES} workers were lost at it, the last with {type(error).__name__}"
                self._writer.finished(asked, Failure("WorkerLost", said))
        elif node is not None:  # it could not even be started
            node.losses += 1
            if node.losses >= MOST_LOSSES:
                node.unusable = f"{MOST_LOSSES} workers could not be started"
                self._note(f"{worker.host} is not used any more: {node.unusable}")

    def _note(self, what: str) -> None:
        logger.info("%s", what)
        self._writer.notes.append(what)


def _refusal(kind: Request, nodes: Sequence[_PlannedNode]) -> Failure:
    """Why none of `nodes` runs this kind of request: as the largest says, or that none offers enough."""
    largest = max(nodes, key=lambda node: node.offered.bytes)
    if kind in largest.failures:
        return largest.failures[kind]
    able = [node for node in nodes if kind in node.peaks]
    needed = format_bytes(min(node.peaks[kind] for node in able)) if able else "more"
    offered = format_bytes(max(node.offered.bytes for node in nodes))
    return Failure("BudgetTooSmall", f"it needs {needed}, and the largest of {len(nodes)} nodes offers {offered}")
