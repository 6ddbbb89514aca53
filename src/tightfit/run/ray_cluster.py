"""A Ray cluster for a batch: a connection to it, and what its nodes offer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from tightfit.devices.choose import find_machine
from tightfit.errors import InputError, RunError
from tightfit.run.batch_placement import NodeCapacity, Placement
from tightfit.run.run_target import RunOptions
from tightfit.signals import keeping_handlers, started

__all__ = ["BYTES", "OfferedNode", "connected", "offered_nodes"]

BYTES = "tightfit_bytes"  # the resource of a node: bytes of its device, or of all its cards together
OBJECT_STORE = 512 * 2**20  # bytes of the local cluster's store, which holds pictures until they are written


@contextlib.contextmanager
def connected(address: str | None, options: RunOptions) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at `address`; None: to one of this computer, for this time.

    InputError if Ray is not installed, RunError if there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning, whatever one does
    try:
        import ray
    except ImportError as error:
        raise InputError(f"--ray needs Ray ({error}): pip install 'tightfit[ray]'") from None
    with contextlib.suppress(AttributeError):  # Ray 2.60 prints a paragraph for each lost worker, at any logging level
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    before = _children()
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        with keeping_handlers():
            if address is None:
                offer = {BYTES: _own_bytes(options)}
                ray.init(include_dashboard=False, resources=offer, object_store_memory=OBJECT_STORE, **quiet)
            else:
                ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this computer" if address is None else f"at {address}"
        raise RunError(f"no Ray cluster {where}: {' '.join(str(error).split())}", address=address) from error
    own = [] if address is not None else [each for each in _children() if each not in before]
    started.extend(own)  # Ray's agents outlive a driver that is ended by a signal by more than half a minute
    try:
        yield ray
    finally:
        ray.shutdown()
        started[:] = [each for each in started if each not in own]


def _children() -> list[psutil.Process]:
    """All processes that this one started, directly or not."""
    return psutil.Process().children(recursive=True)


def _own_bytes(options: RunOptions) -> int:
    """What this computer offers: its free memory, or that of all cards like the one that the options name."""
    device = options.target().device
    alike = [each for each in find_machine().accelerators if each.kind == device.kind]
    return device.free_bytes() * (len(alike) if device.kind == "cuda" else 1)


class OfferedNode(NamedTuple):
    """A node of a cluster that offers memory for requests."""

    node: str
    host: str
    bytes: int
    cpus: int
    cards: int
    cards_each: int  # that each worker uses

    def left(self, workers: Sequence[Placement]) -> NodeCapacity:
        """Return what it has beside `workers`."""
        own = [worker for worker in workers if worker.node == self.node]
        return NodeCapacity(
            node=self.node,
            bytes=self.bytes - sum(worker.bytes for worker in own),
            cpus=self.cpus - len(own),
            cards=self.cards - self.cards_each * len(own),
            card_bytes=self.bytes // self.cards if self.cards and self.cards_each else None,
            cards_each=self.cards_each,
        )


def offered_nodes(nodes: Sequence[Mapping[str, Any]], options: RunOptions) -> list[OfferedNode]:
    """Return those of `ray.nodes()` that are alive, offer BYTES and have the devices that the options name."""
    found = []
    for node in nodes:
        offered = node["Resources"]
        cards = int(offered.get("GPU", 0))
        each = _cards_each(options, cards)
        if node["Alive"] and offered.get(BYTES, 0) >= 1 and each <= cards:
            cpus = int(offered.get("CPU", 0))
            found.append(
                OfferedNode(node["NodeID"], node["NodeManagerHostname"], int(offered[BYTES]), cpus, cards, each)
            )
    return found


def _cards_each(options: RunOptions, cards: int) -> int:
    """Cards that each worker uses on a node with so many `cards`."""
    budget = options.limits.budget if options.limits is not None else None
    if budget is not None and budget.devices:
        return len(budget.devices)
    device = options.device or options.choices.get("device")
    kinds = {name.partition(":")[0] for name in str(device or "cuda,cpu").split(",")}
    if "cuda" not in kinds:
        return 0
    return min(cards, 1) if len(kinds) > 1 else 1
