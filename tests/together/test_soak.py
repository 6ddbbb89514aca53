"""Many threads call one fitted pipeline, each with sizes of its own: right pictures, and no more memory at the end."""

from __future__ import annotations

import functools
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

import tightfit
from tiny_pipelines import PIXELS
from together.trials import SIZES
from together.ways import BUDGET, DISK, LEVEL, MIB, ROUNDING, Way, draw, made

pytestmark = pytest.mark.usefixtures("shared_footprints")

GROWTH = 32 * MIB  # of the process, from a quarter of the calls to the last
RAM = Way("ram", "RAM budget", functools.partial(tightfit.fit, ram="20GB", device="cpu"), ROUNDING)
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "threads", "calls"),
    [
        pytest.param(BUDGET, 3, 3, id="budget, briefly", marks=slow),
        pytest.param(RAM, 3, 3, id="RAM, briefly", marks=slow),
        pytest.param(LEVEL, 8, 200, id="level", marks=slow),
        pytest.param(BUDGET, 8, 50, id="budget", marks=slow),
        pytest.param(DISK, 8, 200, id="disk", marks=slow),
    ],
)
def test_threads_draw_their_pictures_in_flat_memory(way: Way, threads: int, calls: int) -> None:
    plain = made(way.scale)
    expected = {size: draw(plain, size) for size in SIZES}
    del plain
    with way.ready():
        pipe = made(way.scale)
        fitted = way.fit(pipe)
        resident: list[int] = []

        def work(number: int) -> None:
            sizes = random.Random(number)
            for _ in range(calls):
                size = sizes.choice(SIZES)
                found = draw(pipe, size)
                error = (found - expected[size]).abs().max() / expected[size].abs().max()
                assert error <= way.tolerance
                resident.append(psutil.Process().memory_info().rss)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        assert len(resident) == threads * calls
        if calls >= 50:  # else most are first calls, which measure
            assert max(resident[-threads:]) <= max(resident[: len(resident) // 4]) + GROWTH
        weights = fitted.live().weights
        fitted.undo()
        assert fitted.live().weights == 0 <= weights
        assert torch.equal(draw(pipe), expected[SIZES[0]])


@pytest.mark.slow
def test_a_call_of_another_thread_is_planned_for() -> None:
    """It was taken for a part of the call that was running, whose plan is for another size."""
    small, large = PIXELS // 2, 2 * PIXELS
    expected = draw(made(BUDGET.scale), large)
    with BUDGET.ready(), ThreadPoolExecutor(1) as pool:
        pipe, others = made(BUDGET.scale), list[Future[torch.Tensor]]()
        fitted = BUDGET.fit(pipe, request={"height": small, "width": PIXELS})

        def begin_another(*_: Any) -> dict[str, Any]:
            if not others:
                others.append(pool.submit(draw, pipe, large))
                time.sleep(0.5)  # until it waits for this call
            return {}

        draw(pipe, small, callback_on_step_end=begin_another)
        assert (others[0].result(60) - expected).abs().max() <= ROUNDING * expected.abs().max()
        assert fitted.plan.request.height == large
