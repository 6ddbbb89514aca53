"""Threads that wait for each other's calls."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tightfit
from tightfit.apply.call_lock import CallLock
from tightfit.errors import RunError
from tightfit.schema.plan import ComponentPlan
from tiny_pipelines import CASES, PIXELS, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")
SECONDS = 60


def test_pipelines_that_call_each_other_from_two_threads() -> None:
    pipes = [CASE.make(), CASE.make()]
    alone = run(CASE.make(), CASE)
    for pipe in pipes:
        tightfit.fit(pipe, level=0, device="loopback")
    meet = threading.Barrier(2)

    def draw(mine: Any, other: Any) -> torch.Tensor:
        def call_other(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                meet.wait(SECONDS)
                run(other, CASE)
            return tensors

        arguments = CASE.call(PIXELS)
        with torch.no_grad():
            return mine(**arguments, callback_on_step_end=call_other).images

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(draw, *pair) for pair in (pipes, reversed(pipes))]
        errors = [call.exception(SECONDS) for call in calls]
    (refused,) = [error for error in errors if error is not None]
    assert isinstance(refused, RunError)
    assert "two pipelines call each other" in str(refused)
    for pipe in pipes:
        assert torch.equal(run(pipe, CASE), alone)


def test_a_call_that_begins_while_another_plan_is_applied_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, pool = CASE.make(), ThreadPoolExecutor(1)
    own, wanted = type(pipe), run(CASE.make(), CASE)
    fitted = tightfit.fit(pipe, level=0, device="loopback")
    run(pipe, CASE)
    calls: list[Future[torch.Tensor]] = []

    def begun_meanwhile(*given: Any) -> None:
        calls.append(pool.submit(run, pipe, CASE))
        with pytest.raises(TimeoutError):
            calls[-1].result(timeout=1)

    monkeypatch.setattr("tightfit.apply.fitting.limit_allocators", begun_meanwhile)
    with fitted._calls.lock:  # as a call does
        fitted.follow(pipe, fitted.plan.model_copy(update={"components": {"vae": ComponentPlan(placement="offload")}}))
    assert torch.equal(calls[0].result(SECONDS), wanted)
    assert fitted.report().plan.components["vae"].placement == "offload"
    fitted.undo()
    assert type(pipe) is own
    assert torch.equal(run(pipe, CASE), wanted)


def test_threads_wait_in_a_ring() -> None:
    locks, ready = [CallLock() for _ in range(3)], threading.Barrier(3)

    def hold_two(index: int) -> None:
        with locks[index], locks[index]:
            ready.wait(SECONDS)
            with locks[(index + 1) % 3]:
                pass

    with ThreadPoolExecutor(3) as pool:
        errors = [call.exception(SECONDS) for call in [pool.submit(hold_two, index) for index in range(3)]]
    assert sum(isinstance(error, RunError) for error in errors) == 1
    assert errors.count(None) == 2


def test_threads_that_wait_for_one_only_wait() -> None:
    locks, done = [CallLock(), CallLock()], list[int]()

    def work(index: int) -> None:
        for _ in range(200):
            with locks[0], locks[1]:
                done.append(index)

    with ThreadPoolExecutor(4) as pool:
        assert [call.exception(SECONDS) for call in [pool.submit(work, index) for index in range(4)]] == [None] * 4
    assert len(done) == 800
