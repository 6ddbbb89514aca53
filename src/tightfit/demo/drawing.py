"""Scene → pixels: the training images of the demo model.

Edges are anti-aliased from signed distances, so a shape's outline is the same at every position.
"""

from __future__ import annotations

import math
import random

import numpy as np
from numpy.typing import NDArray

from tightfit.demo.grammar import BACKGROUNDS, COLOURS, PLACES, SIDE, SIZES, Scene

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
