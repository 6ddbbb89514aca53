"""The judge of the demo model: right for what is drawn as asked, wrong and why for everything else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from tightfit.demo.judge import judge
from tightfit.demo.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIDE, SIZES, Scene, Thing, draw, random_scene

Picture = NDArray[np.uint8]
RED = Thing("medium", "red", "circle", "on the left")
BLUE = Thing("small", "blue", "square", "on the right")
TWO = Scene((RED, BLUE), "white")


def scenes(count: int, things: tuple[int, ...] = (1, 2)) -> Iterator[tuple[Scene, random.Random]]:
    for seed in range(count):
        rng = random.Random(seed)
        yield random_scene(rng, rng.choice(things)), rng


def complaint(picture: Picture, asked: Scene) -> str:
    verdict = judge(picture, asked)
    assert verdict.right == (verdict.complaint == "")
    return verdict.complaint


def test_what_is_drawn_as_asked_is_right() -> None:
    for scene, rng in scenes(200):
        verdict = judge(draw(scene, rng), scene)
        assert verdict.complaint == "", scene
        assert verdict.right
        assert verdict.asked == scene
        assert verdict.found == tuple(sorted(scene.things))
        assert verdict.background == scene.background


def test_every_thing_is_recognised_at_its_place() -> None:
    for size in SIZES:
        for colour in COLOURS:
            for shape in SHAPES:
                thing = Thing(size, colour, shape, random.Random(f"{size}{colour}{shape}").choice(list(PLACES)))
                scene = Scene((thing,), list(BACKGROUNDS)[len(colour) % 4])
                assert complaint(draw(scene), scene) == ""


def test_the_order_of_the_things_does_not_matter() -> None:
    assert complaint(draw(TWO), Scene((BLUE, RED), "white")) == ""


@pytest.mark.parametrize(
    ("field", "values"),
    [("colour", list(COLOURS)), ("shape", list(SHAPES)), ("size", list(SIZES)), ("place", list(PLACES))],
)
def test_one_attribute_changed_is_wrong_and_named(field: str, values: list[str]) -> None:
    for scene, rng in scenes(30, things=(1,)):
        (asked,) = scene.things
        drawn = dataclasses.replace(asked, **{field: rng.choice([v for v in values if v != getattr(asked, field)])})
        assert complaint(draw(Scene((drawn,), scene.background), rng), scene) == f"wanted {asked}; saw {drawn}"


def test_one_of_two_changed_is_wrong_and_the_other_is_not_blamed() -> None:
    for scene, rng in scenes(30, things=(2,)):
        asked, other = scene.things
        drawn = dataclasses.replace(asked, colour=rng.choice([c for c in COLOURS if c != asked.colour]))
        assert complaint(draw(Scene((drawn, other), scene.background), rng), scene) == f"wanted {asked}; saw {drawn}"


def test_swapped_attributes_are_wrong() -> None:
    """The mistake that diffusion models make: the right colours and shapes on the wrong things."""
    swapped = Scene((dataclasses.replace(RED, colour="blue"), dataclasses.replace(BLUE, colour="red")), "white")
    assert complaint(draw(swapped), TWO) == (
        "wanted a red circle on the left, a small blue square on the right; "
        "saw a blue circle on the left, a small red square on the right"
    )


@pytest.mark.parametrize("drawn", BACKGROUNDS)
def test_another_background_is_wrong_and_named(drawn: str) -> None:
    for scene, rng in scenes(30):
        wanted = "" if drawn == scene.background else f"background {drawn}"
        assert complaint(draw(Scene(scene.things, drawn), rng), scene) == wanted


def test_a_background_of_no_known_colour_is_unclear() -> None:
    picture = np.full((SIDE, SIDE, 3), (0, 90, 0), np.uint8)
    assert judge(picture, TWO).background == "unclear"
    assert complaint(picture, TWO).startswith("background unclear; ")


def test_a_missing_thing_is_wrong_and_named() -> None:
    for scene, rng in scenes(30, things=(2,)):
        missing, left = scene.things
        assert complaint(draw(Scene((left,), scene.background), rng), scene) == f"wanted {missing}; saw nothing"


def test_an_extra_thing_is_wrong_and_named() -> None:
    for scene, rng in scenes(30, things=(2,)):
        asked, extra = scene.things
        assert complaint(draw(scene, rng), Scene((asked,), scene.background)) == f"wanted no more; saw {extra}"


def test_one_thing_does_not_stand_for_two() -> None:
    assert complaint(draw(Scene((RED,), "white")), Scene((RED, RED), "white")) == f"wanted {RED}; saw nothing"


def test_everything_that_is_wrong_is_said() -> None:
    drawn = Scene((dataclasses.replace(RED, shape="square"),), "pink")
    assert complaint(draw(drawn), Scene((RED,), "gray")) == (
        "background pink; wanted a red circle on the left; saw a red square on the left"
    )


# pictures that are only nearly right


def blurred(picture: Picture, sigma: float) -> Picture:
    channels = [ndimage.gaussian_filter(picture[..., channel].astype(np.float32), sigma) for channel in range(3)]
    return np.stack(channels, -1).round().astype(np.uint8)


def noisy(picture: Picture, deviation: float, seed: int) -> Picture:
    noise = np.random.default_rng(seed).normal(0, deviation, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def test_a_thing_blurred_away_is_wrong() -> None:
    for scene, rng in scenes(30):
        assert complaint(blurred(draw(scene, rng), 24), scene).startswith("wanted ")


@pytest.mark.parametrize("side", ["bottom", "right"])
def test_a_half_drawn_thing_is_wrong(side: str) -> None:
    for scene, rng in scenes(30, things=(1,)):
        x, y = (round(centre) for centre in PLACES[scene.things[0].place])
        picture = draw(scene, rng)
        picture[np.s_[y:] if side == "bottom" else np.s_[:, x:]] = BACKGROUNDS[scene.background]
        assert complaint(picture, scene).startswith(f"wanted {scene.things[0]}; saw a")


def test_a_faded_thing_is_wrong() -> None:
    for scene, rng in scenes(30):
        background = np.array(BACKGROUNDS[scene.background], np.float32)
        faded = (background + 0.5 * (draw(scene, rng) - background)).round().astype(np.uint8)
        assert complaint(faded, scene).startswith("wanted ")


def test_a_little_noise_is_forgiven_and_a_lot_is_wrong() -> None:
    for seed, (scene, rng) in enumerate(scenes(30)):
        picture = draw(scene, rng)
        assert complaint(noisy(picture, 8, seed), scene) == ""
        assert complaint(noisy(picture, 90, seed), scene) != ""


def test_a_speck_is_no_thing_and_a_spot_is() -> None:
    picture = draw(TWO)
    picture[2:6, 60:64] = COLOURS["green"]
    assert complaint(picture, TWO) == ""
    picture[2:10, 60:68] = COLOURS["green"]
    assert complaint(picture, TWO).startswith("wanted no more; saw ")


def test_two_things_that_touch_are_not_two_things() -> None:
    picture = draw(TWO)
    picture[62:66, 30:98] = COLOURS["red"]
    assert complaint(picture, TWO).startswith(f"wanted {RED}, {BLUE}; saw ")


# pictures of nothing


@pytest.mark.parametrize(
    "colour", [*BACKGROUNDS.values(), *COLOURS.values(), (0, 0, 0), (255, 255, 255), (0, 255, 255)]
)
def test_one_colour_all_over_shows_nothing(colour: tuple[int, int, int]) -> None:
    verdict = judge(np.full((SIDE, SIDE, 3), colour, np.uint8), TWO)
    assert verdict.found == ()
    assert verdict.complaint.endswith("wanted a red circle on the left, a small blue square on the right; saw nothing")


@pytest.mark.parametrize("block", [1, 2, 8, 32, 64])
def test_noise_of_any_grain_is_judged_wrong(block: int) -> None:
    for seed, (scene, _) in enumerate(scenes(5)):
        granularities = np.random.default_rng(seed).integers(0, 256, (SIDE // block, SIDE // block, 3), dtype=np.uint8)
        assert complaint(granularities.repeat(block, 0).repeat(block, 1), scene) != ""


@pytest.mark.parametrize(
    "part", [np.s_[:, :64], np.s_[:64], np.s_[1:-1, 1:-1], np.s_[40:, 40:], np.s_[:, 63:65], np.s_[:1]]
)
def test_large_areas_are_judged_wrong(part: tuple[slice, ...]) -> None:
    picture = np.full((SIDE, SIDE, 3), BACKGROUNDS["white"], np.uint8)
    picture[part] = COLOURS["red"]
    assert complaint(picture, Scene((RED,), "white")) != ""
