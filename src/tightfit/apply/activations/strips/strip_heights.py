"""How many rows each strip of a stage has: all but the first are equally high, and where possible repeat each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

__all__ = ["StripHeights"]

COARSE = 4  # least multiple of a height that others are rounded to: fewer would change them by more than a quarter
MORE = 0.25  # part of the rows that the first strip must compute; up to that many more, if the others are even then


class StripHeights:
    """Heights of strips, as parts of all rows, for maps of so many `rows` each.

    A map of 60 rows and one of 480, which is made from it, have the same rows in each strip if all strips are a
    multiple of 8 of the 480 rows, and repeat after two strips if they are a multiple of 4. Such heights are *even*.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self._unit = max(math.gcd(*rows), 1)  # heights that are multiples of this part repeat at once

    def parts(self, count: int, lead: float = 0.0) -> list[float]:
        """Return the part of the rows that there is after each of `count` strips.

        The first has less, by the `lead`: the part of its rows by which an argument is ahead of the outputs.
        """
        height = float(self._even(count, lead) or _height(count, lead))
        return [1 - height * left for left in range(count - 1, -1, -1)]

    def near(self, count: int, most: int, lead: float) -> int:
        """Return the number of strips, from `count` to a little above, that repeat after the fewest strips."""
        near = range(count, min(count + count // COARSE, most) + 1)
        found = ((even * self._unit, each) for each in near if (even := self._even(each, lead)) is not None)
        return min(found, key=lambda pair: (pair[0].denominator, pair[1]), default=(0, count))[1]

    def _even(self, count: int, lead: float) -> Fraction | None:
        """Return `_height`, rounded to an even one; None if that is too low, or too high, for the first strip."""
        height, unit = _height(count, lead), self._unit
        while height * unit < COARSE:
            unit *= 2
        for multiple in (math.ceil(height * unit - 1e-9), math.floor(height * unit + 1e-9)):
            even = Fraction(multiple, unit)
            first = 1 - even * (count - 1)
            if 0 < first <= even and first + lead <= max(float(even), (1 + MORE) * lead) + 1e-9:
                return even
        return None


def _height(count: int, lead: float) -> float:
    """Return the height of all of `count` strips but the first."""
    return (1 - max(1 / count - lead, 0.0)) / (count - 1) if count > 1 else 1.0
