"""The cheapest cut is the one that networkx finds in the whole network, before nodes are joined."""

from __future__ import annotations

import random
from typing import Any

import networkx
import pytest
from networkx.algorithms.flow import boykov_kolmogorov

from tightfit.apply.activations.strips.cuts import NEVER, Network


def drawn(seed: int, count: int) -> tuple[Network, Any]:
    """A network in which many prices are alike, as they are in programs, and the same for networkx."""
    draw, network, flow = random.Random(seed), Network(), networkx.DiGraph()
    flow.add_nodes_from(("there", "later"))
    for number in range(count):
        price = draw.choice((0, 4, 4, 4, 7, 16, 64))
        network.add(number, price)
        flow.add_edge((number, 0), (number, 1), capacity=price)
        sources = draw.sample(range(number), min(number, draw.choice((0, 1, 1, 1, 2, 3))))
        for source in sources:
            network.add_edge(number, source)
            flow.add_edge((source, 1), (number, 0), capacity=NEVER)
        given = draw.choice((0, 0, 1, 5)) if sources else NEVER
        if given:
            network.connect_source(number, given)
            flow.add_edge("there", (number, 0), capacity=given)
        if draw.random() < 0.1 or number == count - 1:
            network.connect_sink(number)
            flow.add_edge((number, 1), "later", capacity=NEVER)
    return network, flow


@pytest.mark.parametrize("seed", range(200))
def test_it_is_that_of_the_whole_network(seed: int) -> None:
    network, flow = drawn(seed, count=5 + seed % 60)
    _, (near, _) = networkx.minimum_cut(flow, "there", "later", flow_func=boykov_kolmogorov)
    numbers = {vertex[0] for vertex in flow if isinstance(vertex, tuple)}
    wanted = {number for number in numbers if (number, 0) in near and (number, 1) not in near}
    assert network.cheapest_cut() == wanted


def test_a_chain_is_cut_where_it_is_cheapest_and_of_equals_at_the_last() -> None:
    network = Network()
    for number, price in enumerate((9, 3, 8, 3, 5)):
        network.add(number, price)
        if number:
            network.add_edge(number, number - 1)
    network.connect_source(0, NEVER)
    network.connect_sink(4)
    assert network.cheapest_cut() == {3}
