"""A model's usual request and cards → the largest request of a ladder of sizes that each card holds.

Every rung is measured: images scaled in height and width, clips in length. Nothing is interpolated between two rungs,
or extrapolated beyond the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from fractions import Fraction

from tightfit.schema.chart import Largest
from tightfit.schema.request import Request

__all__ = ["Fitting", "find_max_request", "rungs_above", "rungs_below"]

Fitting = Callable[[Request, Collection[str]], set[str]]  # returns the cards, of those given, that hold the request

REFUSALS = (ValueError, RuntimeError, IndexError)  # raised by a pipeline, or by torch inside a network

STEP = 64  # pixels: every model accepts multiples of this
PICTURES = tuple(map(Fraction, ("1/2", "3/4", "1", "3/2", "2", "3", "4")))
CLIPS = tuple(map(Fraction, ("1/2", "1", "2", "3", "4")))


def rungs_above(usual: Request) -> list[Request]:
    """Return the larger requests of the ladder, smallest first."""
    return _rungs(usual, [times for times in _times(usual) if times > 1])


def rungs_below(usual: Request) -> list[Request]:
    """Return the smaller requests of the ladder, largest first."""
    return _rungs(usual, [times for times in reversed(_times(usual)) if times < 1])


def find_max_request(
    usual: Request, cards: Collection[str], fitting: Fitting, *, upwards: bool = True
) -> dict[str, Largest]:
    """Return the largest rung that each of `cards` holds, and what limits it. Cards that hold none are left out.

    `fitting` raises one of REFUSALS for a request that the model does not accept.

    With `upwards`, larger rungs are tried as long as any card holds the previous one. Then smaller ones are tried for
    the cards that do not hold the usual request.
    """
    left = fitting(usual, cards)
    found = {card: Largest(request=usual, limit="card") for card in left}
    refused = set(cards) - left
    end: dict[str, str | None] = {"limit": "ladder", "refusal": None}
    for rung in rungs_above(usual) if upwards else ():
        if not left:
            break
        try:
            left = fitting(rung, left)
        except REFUSALS as error:
            end = {"limit": "model", "refusal": " ".join(str(error).split())[:200]}
            break
        found |= {card: Largest(request=rung, limit="card") for card in left}
    found |= {card: found[card].model_copy(update=end) for card in left}
    for rung in rungs_below(usual):
        if not refused:
            break
        try:
            held = fitting(rung, refused)
        except REFUSALS:  # the model does not accept this size, but may accept smaller ones
            continue
        found |= {card: Largest(request=rung, limit="card") for card in held}
        refused -= held
    return found


def _times(usual: Request) -> tuple[Fraction, ...]:
    return CLIPS if usual.frames else PICTURES


def _rungs(usual: Request, times: list[Fraction]) -> list[Request]:
    rungs = [_scaled(usual, each) for each in times]
    return [rung for rung in rungs if rung is not None and rung != usual]


def _scaled(usual: Request, times: Fraction) -> Request | None:
    """`usual`, `times` as large; None if that is not a valid number of frames.

    Models accept 4 k + 1, 6 k + 1 or 8 k + 1 frames. As the usual number is one of these, every whole multiple of its
    k gives another, whichever of the three a model needs; and so does half of it.
    """
    if usual.frames:
        frames = (usual.frames - 1) * times
        return usual.model_copy(update={"frames": int(frames) + 1}) if frames.denominator == 1 else None
    sides = {name: int(getattr(usual, name) * times) // STEP * STEP for name in ("height", "width")}
    return usual.model_copy(update=sides) if all(sides.values()) else None
