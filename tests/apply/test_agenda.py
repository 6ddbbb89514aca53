"""Who works next: expected as it was; the one before looks no further than its last pass."""

from __future__ import annotations

from tightfit.apply.weights.call_order import CallOrder
from tightfit.plan.prefetch import PrefetchOrder


def played(agenda: CallOrder, passes: str, steps: int | None = None) -> list[str | None]:
    """What is expected after each of `passes`."""
    agenda.begin(steps)
    seen = []
    for name in passes:
        agenda.begin_call(name, "forward")
        seen.append(agenda.next and agenda.next[0])
    agenda.end()
    return seen


def test_the_first_call_expects_nothing_and_the_next_the_same_again() -> None:
    agenda = CallOrder()
    assert played(agenda, "eedddv") == [None] * 6
    assert played(agenda, "eedddv") == ["e", "d", "d", "d", "v", None]


def test_what_comes_otherwise_ends_the_expectation_for_that_call() -> None:
    agenda = CallOrder()
    played(agenda, "eddv")
    assert played(agenda, "edddv") == ["d", "d", "v", None, None]
    assert played(agenda, "edddv") == ["d", "d", "d", "v", None]


def test_calls_for_other_numbers_of_steps_are_known_apart() -> None:
    agenda = CallOrder()
    played(agenda, "eddv", steps=2)
    assert played(agenda, "ev", steps=1) == [None, None]
    assert played(agenda, "eddv", steps=2) == ["d", "d", "v", None]


def test_a_call_that_does_not_end_teaches_nothing() -> None:
    agenda = CallOrder()
    played(agenda, "edv")
    agenda.begin(None)
    agenda.begin_call("d", "forward")
    assert agenda.next is None
    assert played(agenda, "edv") == ["d", "v", None]


def test_nothing_is_looked_at_beyond_the_last_pass() -> None:
    order: PrefetchOrder[str] = PrefetchOrder("abc")
    offered: list[str] = []
    for last in (False, True):
        order.begin(last=last)
        for key in "abc":
            order.look_ahead(lambda each: offered.append(each) is None)
            assert order.used(key)
            assert order.over(key) == last
        order.look_ahead(lambda each: offered.append(each) is None)
        order.end()
    assert "".join(offered) == "abcabc"
    assert order.looked_through


def test_what_is_used_again_in_the_last_pass_is_not_over() -> None:
    order: PrefetchOrder[str] = PrefetchOrder([])
    for last in (False, True):
        order.begin(last=last)
        seen = []
        for key in "aba":
            order.look_ahead(lambda _: True)
            order.used(key)
            seen.append((order.over("a"), order.over("b")))
        order.end()
    assert seen == [(False, False), (False, True), (True, True)]
