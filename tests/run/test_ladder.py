"""The largest request that fits: only sizes that were tried count, and no more are tried than can matter."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest

from tightfit.catalog.known import known_model, model_names
from tightfit.run.max_request import find_max_request, rungs_above, rungs_below
from tightfit.schema.request import Request

PICTURE = Request(height=1024, width=1024, steps=28)
CLIP = Request(height=480, width=720, frames=49)
AT_A_TIME = {  # frames that an autoencoder makes one of, by class
    "AutoencoderKLWan": 4, "AutoencoderKLCogVideoX": 4, "AutoencoderKLHunyuanVideo": 4, "AutoencoderKLLTXVideo": 8,
    "AutoencoderKLMochi": 6, "AutoencoderKLHunyuanVideo15": 4,
}  # fmt: skip


class Cards:
    """Cards by the most pixels, or frames, that they hold; remembers what was asked."""

    def __init__(self, most: dict[str, int], refuses: int | None = None, error: type[Exception] = ValueError) -> None:
        self.most, self.refuses, self.error, self.asked = most, refuses, error, []  # type: ignore[var-annotated]

    def __call__(self, asked: Request, cards: Collection[str]) -> set[str]:
        size = asked.frames or asked.height or 0
        self.asked.append((size, sorted(cards)))
        if self.refuses is not None and size >= self.refuses:
            raise self.error(f"{size} is\n too much")
        return {card for card in cards if size <= self.most[card]}


def test_each_card_gets_the_largest_that_it_holds() -> None:
    cards = Cards({"small": 800, "middle": 2000, "large": 2048})
    found = find_max_request(PICTURE, cards.most, cards)
    assert {card: (one.request.height, one.request.width, one.limit) for card, one in found.items()} == {
        "small": (768, 768, "card"), "middle": (1536, 1536, "card"), "large": (2048, 2048, "card"),
    }  # fmt: skip
    assert all(one.request.steps == 28 for one in found.values())


def test_only_what_can_matter_is_tried() -> None:
    cards = Cards({"small": 800, "middle": 2000, "large": 2048})
    find_max_request(PICTURE, cards.most, cards)
    both = ["large", "middle"]
    assert cards.asked == [
        (1024, ["large", "middle", "small"]), (1536, both), (2048, both), (3072, ["large"]), (768, ["small"]),
    ]  # fmt: skip


def test_the_top_of_the_ladder_is_no_limit_of_the_card() -> None:
    found = find_max_request(CLIP, ["one"], Cards({"one": 10**6}))
    assert (found["one"].request.frames, found["one"].limit) == (193, "ladder")


@pytest.mark.parametrize("error", [ValueError, RuntimeError, IndexError])
def test_a_model_that_takes_no_more_is_quoted(error: type[Exception]) -> None:
    cards = Cards({"one": 10**6, "two": 97}, refuses=145, error=error)
    found = find_max_request(CLIP, cards.most, cards)
    assert (found["one"].request.frames, found["one"].limit) == (97, "model")
    assert found["one"].refusal == "145 is too much"
    assert cards.asked[-1] == (145, ["one", "two"])


def test_other_failures_are_not_taken_for_a_limit() -> None:
    with pytest.raises(MemoryError):
        find_max_request(CLIP, ["one"], Cards({"one": 10**6}, refuses=97, error=MemoryError))


def test_who_holds_nothing_is_left_out() -> None:
    assert find_max_request(CLIP, ["one"], Cards({"one": 24})) == {}
    assert find_max_request(CLIP, ["one"], Cards({"one": 25}))["one"].request.frames == 25


@pytest.mark.parametrize("model", model_names())
def test_rungs_are_what_the_model_takes(model: str) -> None:
    known = known_model(model)
    usual = known.request
    rungs = [*reversed(rungs_below(usual)), usual, *rungs_above(usual)]
    assert len(rungs) >= 4
    for less, more in itertools.pairwise(rungs):
        assert less.described != more.described
        sizes = [(one.height or 0, one.width or 0, one.frames or 0) for one in (less, more)]
        assert all(low <= high for low, high in zip(*sizes, strict=True))
    if usual.frames:
        step = AT_A_TIME.get(known.components["vae"].class_name, 1)  # others make each frame of one, or round
        assert all(((rung.frames or 0) - 1) % step == 0 for rung in rungs)
        assert {(rung.height, rung.width) for rung in rungs} == {(usual.height, usual.width)}
    else:
        others = [rung for rung in rungs if rung != usual]
        assert not any((rung.height or 0) % 64 or (rung.width or 0) % 64 for rung in others)


def test_pictures_too_small_to_be_halved_stay() -> None:
    assert rungs_below(Request(height=64, width=64)) == []


def test_a_smaller_size_that_a_model_does_not_take_is_passed_over() -> None:
    class Picky(Cards):
        def __call__(self, asked: Request, cards: Collection[str]) -> set[str]:
            if asked.height == 768:
                raise ValueError("768 is no height")
            return super().__call__(asked, cards)

    assert find_max_request(PICTURE, ["small"], Picky({"small": 800}))["small"].request.height == 512
