"""What is kept by the shape of a call is bounded."""

from tightfit.apply.latest_used import MOST_SHAPES, LatestUsed


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    known = LatestUsed[int, str]()
    for number in range(MOST_SHAPES):
        known[number] = str(number)
    assert known[0] == "0"  # used
    assert known.get(2) == "2"
    known[-1] = "one more"
    known[-2] = "and another"
    assert 1 not in known
    assert 3 not in known
    assert known.get(1) is None
    assert len(known) == MOST_SHAPES
    assert list(known)[-4:] == [0, 2, -1, -2]
