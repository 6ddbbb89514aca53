"""Weights on their way, in numbers: never faster than the link and the arithmetic allow, and what stays comes once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.plan.compute_segments import ComputeSegment, seconds_without_weights
from tightfit.plan.timeline import HostOverheads, TransferSimulator

RATE = 1e9


def flow(sizes: dict[str, int], resident: set[str], ring: int, launch: float = 0.0) -> TransferSimulator:
    return TransferSimulator(list(sizes), sizes, resident, ring, RATE, launch)


def segments(seconds: dict[str, float], launching: float = 0.0) -> list[ComputeSegment]:
    return [ComputeSegment(name, took, launching) for name, took in seconds.items()]


SIZES = st.lists(st.integers(1, 10**7), min_size=1, max_size=8)


@settings(deadline=None)
@given(SIZES, st.lists(st.floats(0, 0.02), min_size=8, max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_no_pass_beats_the_link_or_the_arithmetic(
    sizes: list[int], times: list[float], staying: float, ahead: float
) -> None:
    groups = {f"layer.{i}": size for i, size in enumerate(sizes)}
    resident = {name for i, name in enumerate(groups) if i < staying * len(groups) - 0.5}
    passing = [size for name, size in groups.items() if name not in resident]
    largest = max((-(-size // 4096) * 4096 for size in passing), default=0)
    ring = int(largest + ahead * sum(passing)) + 4096 * len(passing)
    spent = dict(zip(groups, times, strict=False))
    run = flow(groups, resident, ring)
    seconds = [run.work(segments(spent)) for _ in range(6)]
    compute, link = sum(spent.values()), sum(passing) / RATE
    assert seconds[0] >= max(compute, groups[next(iter(groups))] / RATE) * (1 - 1e-9)
    again = sum(passing) if len(groups) > 1 else 0  # what is alone stays in the ring
    assert sum(seconds) >= max(6 * compute, (sum(sizes) + 5 * again) / RATE - ring / RATE) * (1 - 1e-9)
    assert all(later <= compute + link + 1e-9 for later in seconds[1:])


def test_what_stays_comes_once() -> None:
    run = flow({"a": 10**7, "b": 10**7}, {"a", "b"}, 0)
    assert run.work(segments({"a": 0.001, "b": 0.001})) == pytest.approx(0.021)
    assert run.complete
    assert run.work(segments({"a": 0.001, "b": 0.001})) == pytest.approx(0.002)


def test_the_host_begins_a_call_when_the_last_one_has_ended() -> None:
    """However long the first call waited for weights, the second takes as long as the host does."""
    run = flow({"a": 10**9}, {"a"}, 0)
    assert run.work(segments({"a": 0.001}, launching=0.005)) == pytest.approx(1.001)
    assert run.work(segments({"a": 0.001}, launching=0.005)) == pytest.approx(0.005)


def test_the_link_is_idle_once_a_pass_has_all_it_uses() -> None:
    run = flow({"a": 10**7, "b": 10**7}, {"a", "b"}, 0)
    run.work(segments({"a": 0.001, "b": 0.004}))
    assert run.idle == pytest.approx(0.004)  # "b" is there when it begins
    run.work(segments({"a": 0.001, "b": 0.004}))
    assert run.idle == pytest.approx(0.005)
    waiting = flow({"a": 10**7, "b": 10**7}, set(), 10**7 + 8192)
    for _ in range(3):
        waiting.work(segments({"a": 0.02, "b": 0.001}))
    assert waiting.idle == pytest.approx(0.001)


def test_a_ring_of_two_hides_the_link_behind_the_arithmetic() -> None:
    run = flow(dict.fromkeys("abcd", 4096 * 1000), set(), 2 * 4096 * 1000)
    seconds = [run.work(segments(dict.fromkeys("abcd", 0.005))) for _ in range(4)]
    assert seconds[0] == pytest.approx(0.004096 + 0.020)
    assert seconds[2:] == pytest.approx([0.020] * 2)


def test_weights_that_are_held_keep_their_room_until_the_next_layer_is_done() -> None:
    run = flow(dict.fromkeys("abc", 4096 * 1000), set(), 2 * 4096 * 1000)
    first, *others = segments(dict.fromkeys("abc", 0.01))
    seconds = [run.work([first._replace(holds=True), *others]) for _ in range(4)]
    assert seconds[2:] == pytest.approx([0.030 + 0.004096] * 2)  # "c" is sent when "b" is done
    plain = flow(dict.fromkeys("abc", 4096 * 1000), set(), 2 * 4096 * 1000)
    assert [plain.work([first, *others]) for _ in range(4)][2:] == pytest.approx([0.030] * 2)


def test_a_host_that_waits_has_launched_nothing_ahead() -> None:
    """Weights come for 20 ms; what is launched meanwhile takes no time later, unless the host waits for the device."""
    first, second = ComputeSegment("a", 0.001, 0.0), ComputeSegment("", 0.0, 0.005)
    for waits, later in ((False, 0.0), (True, 0.005)):
        run = flow({"a": 2 * 10**7}, {"a"}, 0)
        assert run.work([first._replace(waits=waits), second]) == pytest.approx(0.021 + later)
        assert seconds_without_weights([first._replace(waits=waits), second]) == pytest.approx(
            0.005 if not waits else 0.006
        )


def test_the_host_may_be_what_takes_longest() -> None:
    run = flow({"a": 4096}, {"a"}, 0, launch=0.001)
    assert run.work(segments({"a": 0.001}, 0.01)) == pytest.approx(0.011)


def test_the_host_is_busy_with_each_use_of_a_layer() -> None:
    sizes, uses = {"a": 4096, "b": 4096}, segments({"a": 0.0, "b": 0.0, "": 0.0})
    # in the second pass, where nothing stays, the host sends what that begins with, and for the third
    for resident, second, others in (({"a"}, 0.003, 0.003), ({"a", "b"}, 0.002, 0.002), (set[str](), 0.005, 0.004)):
        run = TransferSimulator(
            list(sizes), sizes, resident, 2 * 4096, RATE, overheads=HostOverheads(streamed=0.002, resident=0.001)
        )
        assert [run.work(uses) for _ in range(4)] == pytest.approx([others, second, others, others], abs=1e-5)
    assert seconds_without_weights(uses, 0.001) == pytest.approx(0.002)


def test_layers_that_move_together_come_once_and_are_used_one_by_one() -> None:
    work = [ComputeSegment("a", 0.0, 0.0, layer=layer) for layer in ("a", "b", "c")]
    work = [work[0], ComputeSegment("", 0.0, 0.0), *work[1:], ComputeSegment("d", 0.0, 0.0, layer="d")]
    sizes, overheads = {"a": 3 * 4096, "d": 4096}, HostOverheads(streamed=0.01, resident=0.001)
    run = TransferSimulator(["a", "a", "a", "d"], sizes, set(), 3 * 4096, RATE, overheads=overheads)
    assert [run.work(work) for _ in range(3)][-1] == pytest.approx(2 * 0.009 + 4 * 0.001, abs=1e-4)
    assert seconds_without_weights(work, 0.001) == pytest.approx(0.004)


def test_a_layer_that_is_not_used_after_all_is_in_nobodys_way() -> None:
    sizes = {"a": 2 * 4096, "b": 4096, "c": 2 * 4096, "d": 2 * 4096}
    work = segments(dict.fromkeys("abcd", 0.001))
    guessed, known = (
        TransferSimulator(guess, sizes, set(), 3 * 4096, 10**9) for guess in (list("aabcd"), list("abcd"))
    )
    assert guessed.work(work) < 1.2 * known.work(work)
    assert guessed.work(work) == pytest.approx(known.work(work))


def test_another_order_than_was_guessed_is_slower_once() -> None:
    sizes = dict.fromkeys("abcd", 4096 * 1000)
    guessed = TransferSimulator(list("dcba"), sizes, set(), 2 * 4096 * 1000, RATE)
    known = TransferSimulator(list("abcd"), sizes, set(), 2 * 4096 * 1000, RATE)
    work = segments(dict.fromkeys("abcd", 0.005))
    first, later = [guessed.work(work) for _ in range(3)], [known.work(work) for _ in range(3)]
    assert first[0] > later[0]
    assert first[2] == pytest.approx(later[2])


CALLS = st.lists(st.booleans(), min_size=2, max_size=8)  # whether each call leaves out the middle


@settings(deadline=None)
@given(SIZES, st.lists(st.floats(0, 0.02), min_size=8, max_size=8), CALLS, st.floats(0, 1))
def test_what_the_next_call_leaves_out_is_not_loaded_for_it(
    sizes: list[int], times: list[float], skips: list[bool], ahead: float
) -> None:
    """Each call loads what it uses, once, and nothing else, whatever comes after it."""
    groups = {f"layer.{i}": size for i, size in enumerate(sizes)}
    middle = frozenset(list(groups)[1:-1])
    largest = max(-(-size // 4096) * 4096 for size in sizes)
    run = flow(groups, set(), int(largest + ahead * sum(sizes)))
    loaded: list[str] = []
    send = run._send
    run._send = lambda group, *where: (loaded.append(group), send(group, *where))[1]  # type: ignore[assignment,func-returns-value]
    used: list[str] = []
    spent = dict(zip(groups, times, strict=False))
    for skipped, then in itertools.pairwise([False, *skips, False]):
        own = {group: spent[group] for group in groups if not skipped or group not in middle}
        run.work(segments(own), left_out=middle if skipped else (), then=middle if then else ())
        used += own
    ahead_of_all = loaded[len(used) :]
    kept = len(used) - len(loaded)  # what is all in the ring is not loaded anew
    assert loaded[: len(used)] == used or kept > 0 or len(groups) == 1
    assert ahead_of_all == list(groups)[: len(ahead_of_all)]


def test_a_skip_that_is_known_beforehand_takes_no_longer_than_one_that_is_not() -> None:
    groups = {f"layer.{i}": 10**7 for i in range(8)}
    middle = frozenset(list(groups)[1:-1])
    seconds = []
    for foretold in (frozenset[str](), middle):
        run = flow(groups, set(), 3 * 10**7 + 3 * 4096)
        whole = segments(dict.fromkeys(groups, 0.001))
        run.work(whole)
        run.work(whole, then=foretold)
        run.work([whole[0], whole[-1]], left_out=middle)
        run.work(whole)
        seconds.append(run.now)
    assert seconds[1] <= seconds[0] - 0.01  # layers 1 and 2, at least, were on their way
