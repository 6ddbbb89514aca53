"""Where the workers of a batch are started: as many as requests wait, where the predicted bytes are left."""

from __future__ import annotations

import pytest

from tightfit import Budget
from tightfit.run.batch_placement import NodeCapacity, Placement, RequestGroup, place_workers
from tightfit.run.limits import Limits
from tightfit.run.ray_cluster import BYTES, offered_nodes
from tightfit.run.run_target import RunOptions

GB = 10**9


def node(name: str, size: int, cpus: int = 4, **fields: int) -> NodeCapacity:
    return NodeCapacity(name, size, cpus, fields.pop("cards", 0), **fields)


def test_as_many_workers_as_fit_and_no_more_than_requests() -> None:
    nodes = [node("a", 24 * GB), node("b", 8 * GB)]
    group = RequestGroup(100, {"a": 6 * GB, "b": 6 * GB})
    assert sorted(place_workers(nodes, [group])) == [*[Placement("a", 6 * GB)] * 4, Placement("b", 6 * GB)]
    assert place_workers(nodes, [RequestGroup(1, {"a": 6 * GB, "b": 6 * GB})]) == [Placement("a", 6 * GB)]
    assert place_workers([node("a", 24 * GB, cpus=1)], [group]) == [Placement("a", 6 * GB)]


def test_a_large_request_goes_where_it_fits_before_small_ones_take_the_bytes() -> None:
    nodes = [node("a", 24 * GB), node("b", 8 * GB)]
    small, large = RequestGroup(9, {"a": 5 * GB, "b": 5 * GB}), RequestGroup(1, {"a": 20 * GB, "b": 20 * GB})
    assert sorted(place_workers(nodes, [small, large])) == [Placement("a", 20 * GB), Placement("b", 5 * GB)]


def test_peaks_differ_between_nodes() -> None:
    nodes = [node("a", 24 * GB), node("b", 8 * GB)]
    assert place_workers(nodes, [RequestGroup(1, {"b": 7 * GB})]) == [Placement("b", 7 * GB)]
    assert place_workers(nodes, [RequestGroup(1, {"a": 25 * GB, "b": 9 * GB})]) == []


def test_spare_workers_take_requests_that_they_have_bytes_for() -> None:
    group = RequestGroup(2, {"a": 6 * GB})
    nodes = [node("a", 24 * GB)]
    assert place_workers(nodes, [group], [Placement("a", 8 * GB)]) == [Placement("a", 6 * GB)]
    assert len(place_workers(nodes, [group], [Placement("a", 5 * GB)])) == 2
    assert len(place_workers(nodes, [group], [Placement("b", 8 * GB)])) == 2
    assert place_workers(nodes, [group], [Placement("a", 8 * GB)] * 2) == []


def test_a_card_has_to_hold_a_request_alone() -> None:
    two_cards = node("a", 48 * GB, 16, cards=2, card_bytes=24 * GB, cards_each=1)
    assert len(place_workers([two_cards], [RequestGroup(9, {"a": 10 * GB})])) == 2  # one for each card
    assert place_workers([two_cards], [RequestGroup(9, {"a": 30 * GB})]) == []
    together = node("a", 48 * GB, 16, cards=2, card_bytes=24 * GB, cards_each=2)
    assert place_workers([together], [RequestGroup(9, {"a": 30 * GB})]) == [Placement("a", 30 * GB)]


def entry(name: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeID": name, "NodeManagerHostname": name, "Alive": alive, "Resources": {"CPU": 4.0} | resources}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (RunOptions(), {"cpu": 0, "cards": 1}),
        (RunOptions(device="cpu"), {"cpu": 0, "cards": 0}),
        (RunOptions(device="cuda"), {"cards": 1}),
        (RunOptions(device="loopback"), {"cpu": 0, "cards": 0}),
        (RunOptions(choices={"device": "cuda:0"}), {"cards": 1}),
        (RunOptions(limits=Limits(Budget(devices={"cuda:0": GB, "cuda:1": GB}))), {"cards": 2}),
    ],
)
def test_nodes_with_the_resource_and_the_device_are_used(options: RunOptions, expected: dict[str, int]) -> None:
    nodes = [entry("cpu", tightfit_bytes=8e9), entry("cards", tightfit_bytes=48e9, GPU=2.0)]
    nodes += [entry("none", GPU=2.0), entry("gone", alive=False, tightfit_bytes=8e9)]
    assert BYTES == "tightfit_bytes"
    assert {node.node: node.cards_each for node in offered_nodes(nodes, options)} == expected
    workers = [Placement("cards", 5 * GB), Placement("cpu", GB)]
    for offered in offered_nodes(nodes, options):
        left = offered.left(workers)
        assert left.cpus == 3
        assert left.bytes == (43 * GB if offered.node == "cards" else 7 * GB)
        assert left.card_bytes == (24 * GB if offered.cards_each else None)
        assert left.cards == (offered.cards - offered.cards_each)
