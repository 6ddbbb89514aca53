"""Ctrl-C in a callback whose exceptions Python swallows."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from tightfit.run.progress import heeding_interrupts


def test_an_interrupt_comes_at_once_and_if_it_was_swallowed_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with heeding_interrupts() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a finalizer
            signal.raise_signal(signal.SIGINT)
            pytest.fail("an interrupt interrupts")
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone() -> None:
    done: list[bool] = []

    def work() -> None:
        with heeding_interrupts() as check:
            check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
