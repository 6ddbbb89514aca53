"""Faults that need a process of their own: memory that is not mapped, and other processes on the same card.

Each test starts processes that call functions of this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from card_state import assert_nothing_left, card_state, fill_cache
from cuda_stub import driver
from cuda_stub.compute import computing
from cuda_stub.plugin import rates_without_numbers
from inspection import assert_same, imprint, relative_error
from own_process import started, told
from tightfit.run.call_arguments import request_of
from tiny_pipelines import CASES, TinyCase, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not driver.loaded(), reason="a real card cannot be let fail")]

MIB = 2**20
SIZE = 256 * MIB
ROOT = Path(__file__).parents[2]
FOR_EVER = str(10**6)


@contextlib.contextmanager
def at_work() -> Iterator[tuple[TinyCase, Any, torch.Tensor, dict[str, Any]]]:
    """A pipeline that was called before, its picture at level 0, and what `fit` is given for a budget."""
    with computing(), rates_without_numbers(), torch.no_grad():
        case = next(case for case in CASES if case.name == "Flux")
        pipe = case.make()
        run(pipe, case)
        fitted = tightfit.fit(pipe, level=0, device="cuda")
        wanted = run(pipe, case).cpu()
        fitted.undo()
        yield case, pipe, wanted, {"budget": SIZE, "request": request_of(pipe, (), case.call()), "device": "cuda"}


def tell(**found: Any) -> None:
    print(json.dumps(found | {"races": driver.count("races") + driver.count("hazards")}), flush=True)


# ---- memory that the driver does not map


def maps_nothing() -> None:
    with at_work() as (case, pipe, wanted, chosen):
        card, before = card_state(), imprint(pipe)
        fitted = tightfit.fit(pipe, **chosen)
        same = [torch.equal(run(pipe, case).cpu(), wanted) for _ in range(2)]
        reasons = [reason.because for reason in fitted.plan.reasons]
        growing = fitted.plan.expandable_segments
        fitted.undo()
        assert_same(before, imprint(pipe))
        del fitted
        assert_nothing_left(card)
        torch.empty(64 * MIB, device="cuda")
        tell(same=same, growing=growing, reasons=reasons)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"STUB_FAIL_MAP": "1", "STUB_FAIL_MAP_TIMES": FOR_EVER}, "cuMemSetAccess failed with error 999"),
        ({"STUB_VMM": "0"}, "the card has no virtual memory management"),
    ],
    ids=["refused", "not supported"],
)
def test_segments_are_fixed_where_the_driver_maps_nothing(settings: dict[str, str], why: str) -> None:
    found = told(started(__file__, "maps_nothing", **settings))
    assert found["same"] == [True, True]
    assert not found["growing"]
    assert f"the driver refuses expandable segments: {why}" in found["reasons"]


def maps_no_more() -> None:
    with at_work() as (case, pipe, _, chosen):
        before = imprint(pipe)
        fitted = tightfit.fit(pipe, **chosen)
        growing = fitted.plan.expandable_segments
        filling, said = fill_cache(), ""
        with driver.faults(fail_map=1, fail_map_times=10**6):
            try:
                run(pipe, case)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        failed = driver.count("faults")
        del filling
        fitted.undo()
        assert_same(before, imprint(pipe))
        tell(growing=growing, said=said, failed=failed, registered=driver.count("registered"))


def test_a_driver_that_maps_no_more_gives_one_error_and_the_pipeline_back() -> None:
    """torch's allocator is of no use afterwards; weights are in host memory."""
    found = told(started(__file__, "maps_no_more"))
    assert found["growing"]
    assert found["failed"]
    assert "CUDA driver error: unknown error" in found["said"]
    assert not found["registered"]


# ---- other processes on the card


def beside_others() -> None:
    with at_work() as (case, pipe, wanted, chosen):
        card, before = card_state(), imprint(pipe)
        fitted = tightfit.fit(pipe, **chosen)
        torch.cuda.reset_peak_memory_stats()
        print("fitted", flush=True)
        errors = [relative_error(run(pipe, case).cpu(), wanted) for _ in range(4)]
        reserved = torch.cuda.max_memory_reserved()
        plan = fitted.plan.model_dump(mode="json", include={"vae", "components", "reasons"})
        fitted.undo()
        assert_same(before, imprint(pipe))
        del fitted
        assert_nothing_left(card)
        tell(errors=errors, reserved=reserved, plan=plan)


def test_two_processes_with_a_budget_each_keep_to_it(tmp_path: Path) -> None:
    settings = {"STUB_CARD_FILE": str(tmp_path / "card"), "STUB_TOTAL": str(2 * SIZE + 64 * MIB)}
    settings["XDG_CACHE_HOME"] = str(tmp_path)  # no strips that other tests measured: they round differently
    processes = [started(__file__, "beside_others", **settings) for _ in range(2)]
    for found in [told(each) for each in processes]:
        assert found["errors"] == [0] * 4, found
        assert found["reserved"] <= SIZE


def takes_and_gives_back() -> None:
    """Without torch: memory of the card, now more, now less, until the standard input has a line."""
    runtime, random_sizes = ctypes.CDLL(None), random.Random(1)
    held: list[ctypes.c_void_p] = []
    over: list[str] = []
    threading.Thread(target=lambda: over.append(sys.stdin.readline()), daemon=True).start()
    changes = 0
    print("begins", flush=True)
    while not over:
        if held and random_sizes.random() < 0.5:
            runtime.cudaFree(held.pop(random_sizes.randrange(len(held))))
        else:
            address = ctypes.c_void_p()
            if runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(random_sizes.randrange(1, 64) * MIB)) == 0:
                held.append(address)
        changes += 1
        time.sleep(0.002)
    tell(changes=changes)


def test_a_neighbour_that_takes_and_gives_back_memory(tmp_path: Path) -> None:
    """Right numbers within the budget, whatever is there at the moment; or the error says that memory ran out."""
    settings = {"STUB_CARD_FILE": str(tmp_path / "card"), "STUB_TOTAL": str(SIZE)}
    ours = started(__file__, "beside_a_neighbour", **settings)
    assert ours.stdout is not None
    ours.stdout.readline()
    neighbour = started(__file__, "takes_and_gives_back", **settings)
    assert neighbour.stdout is not None
    neighbour.stdout.readline()
    found = told(ours)
    assert told(neighbour)["changes"] > 10
    assert set(found["outcomes"]) <= {"right", "out of memory"}
    assert "right" in found["outcomes"]
    assert found["reserved"] <= SIZE


def beside_a_neighbour() -> None:
    with at_work() as (case, pipe, wanted, chosen):
        card, before = card_state(), imprint(pipe)
        fitted = tightfit.fit(pipe, **chosen)
        print("fitted", flush=True)
        sys.stdin.readline()  # the neighbour has begun
        torch.cuda.reset_peak_memory_stats()
        outcomes = []
        for _ in range(6):
            torch.cuda.empty_cache()  # so that memory is asked of the driver
            try:
                outcomes.append("right" if right(run(pipe, case).cpu(), wanted) else "wrong")
            except (tightfit.BudgetTooSmall, torch.OutOfMemoryError):
                outcomes.append("out of memory")
        reserved, refused = torch.cuda.max_memory_reserved(), driver.count("refused")
        fitted.undo()
        assert_same(before, imprint(pipe))
        del fitted
        assert_nothing_left(card)
        tell(outcomes=outcomes, reserved=reserved, refused=refused)


def right(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """As far as strips, which may be taken where memory ran out, sum in another order."""
    return bool((found - wanted).norm() <= 1e-5 * wanted.norm())


# ---- other libraries' memory and limits in this process


def test_a_limit_that_was_there_before_is_kept_and_stays() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(SIZE / total, 0)
    try:
        case = next(case for case in CASES if case.name == "Flux")
        pipe = case.make()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fitted = tightfit.fit(pipe, budget=4 * SIZE, device="cuda", request=request_of(pipe, (), case.call()))
        run(pipe, case)
        assert torch.cuda.max_memory_reserved() <= SIZE
        fitted.undo()
        assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(SIZE / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_memory_of_another_library_is_not_counted_on() -> None:
    """It is not torch's: only the driver knows of it."""
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    torch.cuda.empty_cache()
    fitted = tightfit.fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted.undo()
    torch.cuda.empty_cache()
    theirs, runtime = ctypes.c_void_p(), ctypes.CDLL(None)
    size = torch.cuda.mem_get_info(0)[0] - 512 * MIB - SIZE  # without a budget so much stays free
    assert runtime.cudaMalloc(ctypes.byref(theirs), ctypes.c_size_t(size)) == 0
    try:
        fitted = tightfit.fit(pipe, device="cuda", request=request_of(pipe, (), case.call()))
        assert fitted.plan.predicted_peak("cuda:0") <= SIZE
        assert torch.equal(run(pipe, case).cpu(), wanted)
        fitted.undo()
    finally:
        assert runtime.cudaFree(theirs) == 0
