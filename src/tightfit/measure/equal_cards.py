"""Measured rates of several cards → the same rates for cards of one product, which differ by chance alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tightfit.schema.machine import Accelerator, Machine

__all__ = ["with_equal_rates"]

MOST = ("memory_rate", "cache_rate")  # fields of which equal cards have the largest value that was measured
BY_NAME = ("arithmetic_rates", "channels_last_gains")  # the same for each name
LINKS = ("link_rate", "link_rate_out")
OTHER_LINK = 1.4  # times as fast: half of the lanes, or the generation before, has half of the rate


def with_equal_rates(machine: Machine) -> Machine:
    """Return `machine` with the best rates of equal cards for each of them, so that no plan prefers one by chance.

    A card was slower if something else ran while it was measured. A link keeps its own rate if another card's is more
    than OTHER_LINK times as fast: it has fewer lanes, or is of an older generation.
    """
    products: defaultdict[str, list[Accelerator]] = defaultdict(list)
    for card in machine.accelerators:
        products[card.product_name or card.name].append(card)
    accelerators = tuple(_like(products[card.product_name or card.name], card) for card in machine.accelerators)
    return machine.model_copy(update={"accelerators": accelerators})


def _like(cards: Iterable[Accelerator], card: Accelerator) -> Accelerator:
    """Return `card` with the best rates of `cards`, which are of the same product."""
    found: dict[str, object] = {name: max(_known(cards, name), default=None) for name in MOST}
    found["kernel_latency"] = min(_known(cards, "kernel_latency"), default=0.0)
    for name in BY_NAME:
        best: dict[str, float] = {}
        for each in cards:
            for key, rate in getattr(each, name).items():
                best[key] = max(rate, best.get(key, 0.0))
        found[name] = best
    for name in LINKS:
        own = getattr(card, name)
        found[name] = own and max(rate for rate in _known(cards, name) if rate <= OTHER_LINK * own)
    return card.model_copy(update=found)


def _known(cards: Iterable[Accelerator], name: str) -> list[float]:
    """Return the values of a field that are known."""
    return [value for each in cards if (value := getattr(each, name))]
