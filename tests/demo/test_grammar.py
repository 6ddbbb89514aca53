"""The language of the demo model: every scene has its caption, every caption its scene."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    PLACES,
    SHAPES,
    SIZES,
    WORDS,
    Scene,
    Thing,
    caption,
    parse,
    random_scene,
    unknown_words,
)

THINGS = st.builds(Thing, *(st.sampled_from(list(words)) for words in (SIZES, COLOURS, SHAPES, PLACES)))
SCENES = st.builds(Scene, st.lists(THINGS, min_size=1, max_size=2).map(tuple), st.sampled_from(list(BACKGROUNDS)))


def scenes(count: int) -> list[tuple[Scene, random.Random]]:
    rngs = [random.Random(seed) for seed in range(count)]
    return [(random_scene(rng, rng.choice((1, 2))), rng) for rng in rngs]


@settings(deadline=None)
@given(SCENES, st.randoms(use_true_random=False))
def test_a_caption_parses_back_to_its_scene(scene: Scene, rng: random.Random) -> None:
    assert parse(str(scene)) == scene
    assert parse(caption(scene, rng)) == scene


def test_captions_of_random_scenes_parse_back() -> None:
    assert all(parse(caption(scene, rng)) == scene for scene, rng in scenes(300))


@settings(deadline=None)
@given(SCENES)
def test_different_scenes_have_different_captions(scene: Scene) -> None:
    first, *rest = scene.things
    others = [Thing(size, first.colour, first.shape, first.place) for size in SIZES if size != first.size]
    others += [Thing(first.size, colour, first.shape, first.place) for colour in COLOURS if colour != first.colour]
    assert str(scene) not in {str(Scene((other, *rest), scene.background)) for other in others}


@settings(deadline=None)
@given(SCENES)
def test_capitals_and_spaces_do_not_matter(scene: Scene) -> None:
    assert parse("  " + str(scene).upper().replace(" ", " \n ")) == scene


def test_what_is_usual_is_left_out() -> None:
    thing = Thing("medium", "orange", "circle", "at the top")
    assert str(Scene((thing,), "white")) == "an orange circle at the top"
    small = Thing("small", "orange", "square", "on the left")
    assert str(Scene((thing, small), "gray")) == (
        "an orange circle at the top and a small orange square on the left on a gray background"
    )
    assert parse("an orange circle at the top on a white background") == Scene((thing,), "white")


def test_a_white_background_is_named_in_half_of_the_captions() -> None:
    rng, scene = random.Random(1), Scene((Thing("small", "red", "circle", "at the top"),), "white")
    named = Counter(caption(scene, rng).endswith(" on a white background") for _ in range(400))
    assert 150 < named[True] < 250
    pink = Scene(scene.things, "pink")
    assert {caption(pink, rng) for _ in range(20)} == {str(pink)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "and",
        "a red circle",
        "red circle on the left",
        "a circle on the left",
        "a red thing on the left",
        "a medium red circle on the left",  # medium is never said
        "a red small circle on the left",
        "a red circle on the left.",
        "a red circle on the left and",
        "a red circle on the left a blue square on the right",
        "a red circle left of a blue square",
        "a red circle on the left on a blue background",
        "a red circle on the left on a pink background and a blue square on the right",
        "a red circle on the left and a blue square on the right and a green circle at the top",
        "on a white background",
        "an astronaut riding a horse",
    ],
)
def test_other_text_has_no_scene(text: str) -> None:
    assert parse(text) is None


@settings(deadline=None)
@given(st.lists(st.sampled_from([*sorted(WORDS), *PLACES, "medium", "teal", "."]), max_size=12).map(" ".join))
def test_words_in_any_order_have_a_scene_that_says_the_same_or_none(text: str) -> None:
    scene = parse(text)
    assert scene is None or parse(str(scene)) == scene


# words, each of which is one token of the demo model


def test_every_word_is_used_and_no_other() -> None:
    used = {word for scene, rng in scenes(1000) for word in caption(scene, rng).split()}
    assert used == WORDS


@settings(deadline=None)
@given(SCENES, st.randoms(use_true_random=False))
def test_a_caption_has_no_unknown_words(scene: Scene, rng: random.Random) -> None:
    assert unknown_words(caption(scene, rng)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("a RED circle, on the left!", []),
        ("a teal circle on the far left", ["teal", "far"]),
        ("two red circles", ["two", "circles"]),
        ("a medium red circle", ["medium"]),
        ("teal, teal", ["teal", "teal"]),
        ("ein größer Kreis", ["ein", "größer", "kreis"]),
        ("red_circle 3d 赤", ["3d", "赤"]),
        ("...", []),
    ],
)
def test_unknown_words_come_in_order(text: str, words: list[str]) -> None:
    assert unknown_words(text) == words


# the scenes that are drawn at random


def test_random_scenes_are_the_same_for_the_same_seed() -> None:
    assert [scene for scene, _ in scenes(50)] == [scene for scene, _ in scenes(50)]


def test_random_scenes_have_as_many_things_as_asked() -> None:
    assert all(len(random_scene(random.Random(seed), count).things) == count for seed in range(50) for count in (1, 2))


def test_random_scenes_use_the_whole_grammar() -> None:
    things = [thing for scene, _ in scenes(1000) for thing in scene.things]
    for field, words in {"size": SIZES, "colour": COLOURS, "shape": SHAPES, "place": PLACES}.items():
        assert {getattr(thing, field) for thing in things} == set(words)
    assert {scene.background for scene, _ in scenes(100)} == set(BACKGROUNDS)


def test_two_things_never_touch() -> None:
    for scene, _ in scenes(1000):
        if len(scene.things) == 2:
            first, second = scene.things
            assert len({first.place, second.place, "in the center"}) == 3
            opposite = {first.place, second.place} in ({"on the left", "on the right"}, {"at the top", "at the bottom"})
            assert opposite or "large" not in {first.size, second.size}
