"""How ranks share an autoencoder: the first way that fits, with the reason for it."""

from __future__ import annotations

import pytest

from tightfit import BudgetTooSmall
from tightfit.plan.rank_choice import sharing_autoencoders
from tightfit.schema.rank_option import AutoencoderSharing

AT_ONCE, IN_STRIPS, ALONE = AutoencoderSharing(), AutoencoderSharing(strips=100), AutoencoderSharing(shared=False)


@pytest.mark.parametrize(
    ("too_small", "phase", "tried", "because"),
    [
        ((), "decode", [AT_ONCE], []),
        ((AT_ONCE,), "decode", [AT_ONCE, IN_STRIPS], ["with all of its rows at once, 1600 do"]),
        ((AT_ONCE,), "encode inputs", [AT_ONCE, IN_STRIPS], ["with all of its rows at once, 1600 do"]),
        ((AT_ONCE, IN_STRIPS), "decode", [AT_ONCE, IN_STRIPS, ALONE], ["with their rows shared, 1600 do"]),
        ((AT_ONCE,), "denoise", [AT_ONCE, ALONE], ["with their rows shared, 1600 do"]),
        ((AT_ONCE,), None, [AT_ONCE, ALONE], ["with their rows shared, 1600 do"]),
    ],
)
def test_autoencoders_are_shared_in_the_first_way_that_fits(
    too_small: tuple[AutoencoderSharing, ...], phase: str | None, tried: list[AutoencoderSharing], because: list[str]
) -> None:
    seen = []

    def attempt(way: AutoencoderSharing) -> AutoencoderSharing:
        seen.append(way)
        if way in too_small:
            raise BudgetTooSmall("1600 do", needed_bytes=1600, phase=phase)
        return way

    taken, reasons = sharing_autoencoders(attempt)
    assert (taken, seen) == (tried[-1], tried)
    assert [reason.because for reason in reasons] == because


def test_the_refusal_has_the_fewest_bytes_that_would_do() -> None:
    def attempt(way: AutoencoderSharing) -> None:
        needed = 800 if way == IN_STRIPS else 1600
        raise BudgetTooSmall(f"{needed} would do", needed_bytes=needed, phase="decode")

    with pytest.raises(BudgetTooSmall, match="800 would do"):
        sharing_autoencoders(attempt)


def test_clips_are_not_tried_in_strips() -> None:
    seen = []

    def attempt(way: AutoencoderSharing) -> None:
        seen.append(way)
        if way.shared:
            raise BudgetTooSmall("", needed_bytes=1600, phase="decode", frames=9)

    sharing_autoencoders(attempt)
    assert seen == [AT_ONCE, ALONE]


def test_the_way_that_is_asked_for_is_the_only_one() -> None:
    def attempt(way: AutoencoderSharing) -> None:
        raise BudgetTooSmall(str(way.shared), needed_bytes=1600, phase="decode")

    with pytest.raises(BudgetTooSmall, match="False"):
        sharing_autoencoders(attempt, ALONE)
