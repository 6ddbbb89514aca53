"""Scenes of one or two things: the captions that describe them, the demo model's prompts, and their pixels.

The place of each thing follows its noun ("a red circle on the left and a small blue square on the right on a
white background"). CLIP's text encoder is causal: if the place follows its noun, one token can attend to size,
colour, shape and place. In "A left of B" this is not so, and the model did not learn it. A size that is left out means
medium, a background that is left out means white.

Edges are anti-aliased from signed distances, so a shape's outline is the same at every position.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE = 128  # pixels, both ways

# radius in pixels of the circle of that size
SIZES: dict[str, float] = {"small": 10.5, "medium": 15.5, "large": 22.5}
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 165, 65),
    "blue": (40, 80, 225),
    "yellow": (240, 212, 40),
    "orange": (245, 132, 28),
    "purple": (145, 50, 175),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond")
# words -> centre in pixels, x then y
PLACES: dict[str, tuple[float, float]] = {
    "on the left": (30.0, 64.0),
    "on the right": (98.0, 64.0),
    "at the top": (64.0, 30.0),
    "at the bottom": (64.0, 98.0),
    "in the center": (64.0, 64.0),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (252, 252, 252),
    "black": (14, 14, 14),
    "gray": (128, 128, 128),
    "pink": (250, 185, 205),
}

WORDS: frozenset[str] = frozenset(
    [*SIZES, *COLOURS, *SHAPES, *BACKGROUNDS, "a", "an", "and", "background"]
    + [word for place in PLACES for word in place.split()]
) - {"medium"}


@dataclass(frozen=True, order=True)
class Thing:
    """One coloured shape at one place."""

    size: str
    colour: str
    shape: str
    place: str

    def __str__(self) -> str:
        words = [self.colour, self.shape, self.place]
        if self.size != "medium":
            words.insert(0, self.size)
        article = "an" if words[0][0] in "aeiou" else "a"
        return " ".join([article, *words])


@dataclass(frozen=True)
class Scene:
    """One or two things on a background; `str(scene)` is its shortest caption."""

    things: tuple[Thing, ...]
    background: str

    def __str__(self) -> str:
        caption = " and ".join(map(str, self.things))
        return caption if self.background == "white" else f"{caption} on a {self.background} background"


def caption(scene: Scene, rng: random.Random) -> str:
    """A caption of `scene`; a white background is named in half of them."""
    text = str(scene)
    if scene.background == "white" and rng.random() < 0.5:
        text += " on a white background"
    return text


def random_scene(rng: random.Random, things: int) -> Scene:
    """A random scene of one or two `things`, uniform over the grammar."""
    background = rng.choice(list(BACKGROUNDS))
    if things == 1:
        return Scene((_random_thing(rng, rng.choice(list(PLACES)), list(SIZES)),), background)
    first, second = rng.sample([place for place in PLACES if place != "in the center"], 2)
    sizes = list(SIZES) if _opposite(first, second) else ["small", "medium"]  # large neighbours would touch
    return Scene((_random_thing(rng, first, sizes), _random_thing(rng, second, sizes)), background)


def _random_thing(rng: random.Random, place: str, sizes: list[str]) -> Thing:
    return Thing(rng.choice(sizes), rng.choice(list(COLOURS)), rng.choice(SHAPES), place)


def _opposite(first: str, second: str) -> bool:
    (x1, y1), (x2, y2) = PLACES[first], PLACES[second]
    return (x1 + x2, y1 + y2) == (SIDE, SIDE)


_BACKGROUND = re.compile(rf" on a ({'|'.join(BACKGROUNDS)}) background$")
_THING = re.compile(rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(PLACES)})")


def parse(text: str) -> Scene | None:
    """The scene that `text` describes, or None where it is not a caption of this grammar."""
    text = " ".join(text.lower().split())
    background = _BACKGROUND.search(text)
    matches = [_THING.fullmatch(part) for part in _BACKGROUND.sub("", text).split(" and ")]
    things = [Thing(m[1] or "medium", m[2], m[3], m[4]) for m in matches if m]
    if len(things) != len(matches) or len(things) > 2:
        return None
    return Scene(tuple(things), background[1] if background else "white")


def unknown_words(text: str) -> list[str]:
    """The words of `text` that are not in the demo model's vocabulary, in order."""
    return [word for word in re.findall(r"[^\W_]+", text.lower()) if word not in WORDS]


JITTER = 3.0  # largest random offset of a shape from its place in x and in y, in pixels
STRETCH = 0.05  # largest random change of a radius, as a fraction of it

_ROOT3 = math.sqrt(3.0)


def draw(scene: Scene, rng: random.Random | None = None) -> NDArray[np.uint8]:
    """Draw `scene`, uint8 of shape (128, 128, 3); with `rng`, places and sizes vary by JITTER and STRETCH."""
    picture = np.empty((SIDE, SIDE, 3), np.float32)
    picture[:] = BACKGROUNDS[scene.background]
    for thing in scene.things:
        (x, y), radius = PLACES[thing.place], SIZES[thing.size]
        if rng is not None:
            x, y = x + rng.uniform(-JITTER, JITTER), y + rng.uniform(-JITTER, JITTER)
            radius *= rng.uniform(1 - STRETCH, 1 + STRETCH)
        cover = coverage(thing.shape, x, y, radius)[..., None]
        picture += cover * (np.array(COLOURS[thing.colour], np.float32) - picture)
    return picture.round().astype(np.uint8)


def coverage(shape: str, x: float, y: float, radius: float) -> NDArray[np.float32]:
    """Fraction of each pixel that the shape centred at (x, y) covers, float32 of shape (128, 128) in [0, 1]."""
    axis = np.arange(SIDE, dtype=np.float32) + 0.5
    dx, dy = axis[None, :] - np.float32(x), axis[:, None] - np.float32(y)
    cover: NDArray[np.float32] = np.clip(0.5 - _distance(shape, dx, dy, radius), 0.0, 1.0)
    return cover


def extent(shape: str, radius: float) -> tuple[float, float]:
    """Width and height in pixels of `shape` at `radius`."""
    width, height = _EXTENTS[shape]
    return width * radius, height * radius


# width and height for radius 1; areas are near that of the circle
_EXTENTS: dict[str, tuple[float, float]] = {
    "circle": (2.0, 2.0),
    "square": (1.772, 1.772),
    "triangle": (1.2 * _ROOT3, 1.8),
    "diamond": (2.4, 2.4),
}


def _distance(shape: str, dx: NDArray[np.float32], dy: NDArray[np.float32], radius: float) -> NDArray[np.float32]:
    """Signed distance in pixels to the outline, negative inside (exact along edges; no other part is visible)."""
    width, height = extent(shape, radius)
    distance: NDArray[np.floating]
    match shape:
        case "circle":
            distance = np.hypot(dx, dy) - radius
        case "square":
            distance = np.maximum(np.abs(dx), np.abs(dy)) - width / 2
        case "diamond":
            distance = (np.abs(dx) + np.abs(dy) - width / 2) / np.float32(math.sqrt(2.0))
        case "triangle":  # equilateral, pointing up, centred by its box
            slanted = (np.abs(dx) * height - (dy + height / 2) * (width / 2)) / math.hypot(height, width / 2)
            distance = np.maximum(dy - height / 2, slanted)
        case _:
            raise ValueError(f"no such shape: {shape!r}")
    return distance.astype(np.float32)
