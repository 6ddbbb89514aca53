"""Two timelines that overlap where they may."""

from __future__ import annotations

from tightfit.simulator.timeline import Host, Timeline


def test_a_copy_and_arithmetic_overlap_on_two_streams() -> None:
    host = Host()
    timeline = Timeline(host, launch=1)
    assert timeline.run(0, "compute", 100) == (1, 101)
    assert timeline.run(1, "in", 80) == (2, 82)
    assert host.now == 2
    timeline.synchronize()
    assert host.now == 101


def test_a_stream_works_in_order_and_an_engine_on_one_thing_at_a_time() -> None:
    timeline = Timeline(Host(), launch=0)
    assert timeline.run(0, "in", 10) == (0, 10)
    assert timeline.run(0, "compute", 10) == (10, 20)
    assert timeline.run(1, "compute", 10) == (20, 30)
    assert timeline.run(1, "out", 10) == (30, 40)


def test_a_stream_waits_for_an_event_of_another() -> None:
    host = Host()
    timeline = Timeline(host, launch=0)
    timeline.run(1, "in", 50)
    arrived = timeline.record(1)
    assert not arrived.done()
    timeline.wait(0, arrived)
    assert timeline.run(0, "compute", 10) == (50, 60)
    arrived.wait()
    assert host.now == 50
    assert arrived.done()


def test_a_slow_host_leaves_the_card_idle() -> None:
    timeline = Timeline(Host(), launch=10)
    assert [timeline.run(0, "compute", 4) for _ in range(3)] == [(10, 14), (20, 24), (30, 34)]


def test_what_the_host_does_on_the_critical_path_is_known() -> None:
    host = Host()
    timeline = Timeline(host, launch=10)
    for _ in range(3):
        timeline.run(0, "compute", 4)  # waits for the host each time
    assert timeline.end == (34, 30)
    for _ in range(3):
        timeline.run(0, "compute", 100)  # the first is launched when nothing runs
    assert timeline.end == (340, 40)
    assert host.time == (60, 60)
    timeline.synchronize()
    timeline.run(0, "compute", 4)
    assert timeline.end == (354, 50)
    timeline.run(0, "compute", 30, of_host=20)  # a call that is repeated as a whole
    assert timeline.end == (390, 80)
