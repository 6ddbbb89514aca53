"""A model's usual request and cards → the largest request of the same kind that each card holds. Nothing is guessed.

The rungs are sizes that are measured: pictures as many times as high and wide, clips as many times as long. Between
two rungs nothing is known, and beyond the last one neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from fractions import Fraction

from tightfit.schema.chart import Largest
from tightfit.schema.footprint import Request

__all__ = ["Fitting", "find_max_request", "rungs_above", "rungs_below"]

Fitting = Callable[[Request, Collection[str]], set[str]]  # which of these cards hold it

REFUSALS = (ValueError, RuntimeError, IndexError)  # of a pipeline, or of torch in the middle of a network

STEP = 64  # pixels: what is a multiple of this suits every model
PICTURES = tuple(map(Fraction, ("1/2", "3/4", "1", "3/2", "2", "3", "4")))
CLIPS = tuple(map(Fraction, ("1/2", "1", "2", "3", "4")))


def rungs_above(usual: Request) -> list[Request]:
    """Larger ones, the smallest first."""
    return _rungs(usual, [times for times in _times(usual) if times > 1])


def rungs_below(usual: Request) -> list[Request]:
    """Smaller ones, the largest first."""
    return _rungs(usual, [times for times in reversed(_times(usual)) if times < 1])


def find_max_request(
    usual: Request, cards: Collection[str], fitting: Fitting, *, upwards: bool = True
) -> dict[str, Largest]:
    """The largest rung that each of `cards` holds, and what keeps it from more. Who holds none is left out.

    What a model takes no call of, `fitting` answers by raising one of REFUSALS.

    Rungs are tried as long as any card holds the one before: first `upwards`, unless nobody wants that, then downwards
    for those that do not hold the usual request.
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
        except REFUSALS:  # a size between others that the model does not take
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
    """`usual`, so many times as large; None where that is no length of a clip.

    Models take some frames at a time and one more at the beginning: 4 k + 1, 6 k + 1 or 8 k + 1. As the usual number
    is one of these, so is every whole multiple of its k, however many frames are taken at a time; and its half.
    """
    if usual.frames:
        frames = (usual.frames - 1) * times
        return usual.model_copy(update={"frames": int(frames) + 1}) if frames.denominator == 1 else None
    sides = {name: int(getattr(usual, name) * times) // STEP * STEP for name in ("height", "width")}
    return usual.model_copy(update=sides) if all(sides.values()) else None
