"""What is kept by the shape of a call is bounded."""

from tightfit.apply.latest_used import LatestUsed


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    known = LatestUsed[str, int](2)
    known["a"], known["b"] = 1, 2
    assert known.get("a") == 1  # used
    known["c"] = 3
    assert known.get("b") is None
    assert (known.get("a"), known.get("c"), len(known)) == (1, 3, 2)
    known.pop("a")
    assert known.get("a") is None
