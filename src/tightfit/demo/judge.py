"""Image → the things in it, found by rules: for the demo model's scores.

A colour is the nearest one of the palette, a shape the one with the largest overlap with its ideal outline in the
same bounding box, a size the first within tolerance, a place the nearest centre. Anything else makes the image wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightfit.demo.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIDE, SIZES, Scene, Thing, coverage, extent

SPECK = 24  # pixels; a smaller blob is not a thing
COLOUR_TOLERANCE = 60.0  # Euclidean distance in RGB
PLACE_TOLERANCE = 14.0  # pixels from the place's centre
SIZE_TOLERANCE = 1.22  # largest ratio to the nominal size; neighbouring sizes differ by a factor of 1.45
OVERLAP = 0.8  # least intersection over union with the ideal shape
PURITY = 0.7  # least fraction of a blob's pixels with its colour; a fifth of a small thing is outline


@dataclass(frozen=True)
class Verdict:
    """The requested scene, the things found, and what is wrong ('' if nothing is)."""

    asked: Scene
    found: tuple[Thing, ...]
    background: str
    complaint: str

    @property
    def right(self) -> bool:
        return not self.complaint


def judge(picture: NDArray[np.uint8], asked: Scene) -> Verdict:
    """Check whether `picture`, uint8 of shape (128, 128, 3), shows exactly `asked`."""
    pixels = picture.astype(np.float32)
    background = _nearest(_border_colour(pixels), BACKGROUNDS)
    found = tuple(sorted(_things(pixels)))
    complaints = [] if background == asked.background else [f"background {background}"]
    missing, extra = _difference(asked.things, found), _difference(found, asked.things)
    if missing or extra:
        complaints.append(
            f"wanted {', '.join(map(str, missing)) or 'no more'}; saw {', '.join(map(str, extra)) or 'nothing'}"
        )
    return Verdict(asked, found, background, "; ".join(complaints))


def _difference(left: tuple[Thing, ...], right: tuple[Thing, ...]) -> list[Thing]:
    rest = list(right)
    missing = []
    for thing in left:
        if thing in rest:
            rest.remove(thing)
        else:
            missing.append(thing)
    return missing


def _border_colour(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    middle: NDArray[np.float32] = np.median(border, axis=0)
    return middle


def _things(pixels: NDArray[np.float32]) -> list[Thing]:
    from scipy import ndimage  # a development dependency, needed only here

    differs = np.linalg.norm(pixels - _border_colour(pixels), axis=-1) > COLOUR_TOLERANCE
    labels, count = ndimage.label(differs)
    blobs = (labels == index for index in range(1, count + 1))
    return [_describe(pixels, blob) for blob in blobs if blob.sum() >= SPECK]


def _describe(pixels: NDArray[np.float32], blob: NDArray[np.bool_]) -> Thing:
    rows, columns = np.flatnonzero(blob.any(1)), np.flatnonzero(blob.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    width, height = float(right - left), float(bottom - top)
    x, y = (left + right) / 2, (top + bottom) / 2
    shape = _shape(blob, x, y, width, height)
    return Thing(_size(shape, width, height), _colour(pixels, blob), shape, _place(x, y))


def _colour(pixels: NDArray[np.float32], blob: NDArray[np.bool_]) -> str:
    name = _nearest(np.median(pixels[blob], axis=0), COLOURS)
    if name == "unclear":
        return name
    near = np.linalg.norm(pixels[blob] - np.array(COLOURS[name]), axis=-1) <= COLOUR_TOLERANCE
    return name if near.mean() >= PURITY else "unclear"


def _nearest(colour: NDArray[np.float32], palette: dict[str, tuple[int, int, int]]) -> str:
    distances = {name: float(np.linalg.norm(colour - np.array(value))) for name, value in palette.items()}
    best = min(distances, key=distances.__getitem__)
    return best if distances[best] <= COLOUR_TOLERANCE else "unclear"


def _shape(blob: NDArray[np.bool_], x: float, y: float, width: float, height: float) -> str:
    overlaps = {}
    for shape in SHAPES:
        unit_width, unit_height = extent(shape, 1.0)
        ideal = coverage(shape, x, y, (width / unit_width + height / unit_height) / 2) > 0.5
        overlaps[shape] = float((ideal & blob).sum() / (ideal | blob).sum())
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] >= OVERLAP else "unclear"


def _size(shape: str, width: float, height: float) -> str:
    if shape == "unclear":
        return "unclear"
    for name, radius in SIZES.items():
        ratio = sum((width, height)) / sum(extent(shape, radius))
        if 1 / SIZE_TOLERANCE <= ratio <= SIZE_TOLERANCE:
            return name
    return "unclear"


def _place(x: float, y: float) -> str:
    distances = {name: float(np.hypot(x - px, y - py)) for name, (px, py) in PLACES.items()}
    best = min(distances, key=distances.__getitem__)
    return best if distances[best] <= PLACE_TOLERANCE and max(x, y) < SIDE else "unclear"
