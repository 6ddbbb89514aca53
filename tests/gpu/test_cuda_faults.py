"""Calls of the driver that fail: right numbers, or one clear error with nothing left; and then all is as before.

Only the stub of a card can let its calls fail.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tightfit
from card_state import assert_nothing_left, card_state, fill_cache
from cuda_stub import driver
from inspection import assert_same, imprint, relative_error
from tightfit.errors import TightfitError
from tightfit.run.call_arguments import request_of
from tiny_pipelines import CASES, TinyCase, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.loaded(), reason="a real card cannot be let fail"),
    pytest.mark.filterwarnings("ignore:gemm_and_bias error"),  # torch's own, before it tries another way
]

MIB = 2**20
SIZE = 512 * MIB
FOR_EVER = 10**6
STREAMED = {"level": 3, "vae": {"slicing": False}}
OUT_OF_MEMORY = r"out of memory|ALLOC_FAILED"


@dataclass(frozen=True)
class Fault:
    """What fails, the n-th time and so many times, while `fit` or a call works; and how an error may name it."""

    kind: str
    number: int
    when: str
    chosen: str  # what `fit` is given: "level 3", "resident" or "budget"
    times: int = 1
    error: str = OUT_OF_MEMORY

    def __str__(self) -> str:
        return f"{self.kind} {self.number} (x{self.times}) in {self.when} at {self.chosen}"

    @property
    def settings(self) -> dict[str, int]:
        if self.kind == "neighbour":  # leaves so many MiB
            return {"neighbour": torch.cuda.mem_get_info()[0] - self.number * MIB}
        return {f"fail_{self.kind}": self.number, f"fail_{self.kind}_times": self.times}


COPY, ENGINE = "unknown error", "unable to find an engine|CUDNN|cuDNN"
ONE_OF_EACH = (
    Fault("malloc", 1, "fit", "resident", times=4),
    Fault("malloc", 1, "call", "level 3", times=2),
    Fault("malloc", 1, "call", "budget", times=2),
    Fault("register", 1, "fit", "level 3"),
    Fault("register", 2, "fit", "level 3", times=FOR_EVER),
    Fault("neighbour", 0, "call", "level 3"),
    Fault("neighbour", 0, "call", "budget"),
    Fault("cublas", 20, "call", "level 3"),
    Fault("cudnn", 3, "call", "level 3", error=ENGINE),
    Fault("copy", 5, "fit", "resident", error=COPY),
    Fault("copy", 40, "call", "level 3", error=COPY),
)
MORE = tuple(
    Fault(kind, number, when, chosen, times, {"copy": COPY, "cudnn": ENGINE}.get(kind, OUT_OF_MEMORY))
    for kind in ("malloc", "register", "cublas", "cudnn", "copy", "neighbour")
    for number in (1, 2, 5, 9, 33)
    for when in ("fit", "call")
    for chosen in ("resident", "level 3", "budget")
    for times in ((1, 3, FOR_EVER) if kind != "neighbour" else (1,))
    if not (when == "fit" and kind in ("cublas", "cudnn")) and not (chosen != "level 3" and kind == "register")
)


@pytest.mark.parametrize(
    "fault",
    [*ONE_OF_EACH, *(pytest.param(fault, marks=pytest.mark.full) for fault in MORE if fault not in ONE_OF_EACH)],
    ids=str,
)
def test_a_fault_gives_right_numbers_or_one_clear_error(fault: Fault) -> None:
    if not happened(fault):
        assert fault not in ONE_OF_EACH, "nothing failed: this tests nothing"
        pytest.skip("there is no such call")


@functools.cache
def prepared() -> tuple[TinyCase, Any, torch.Tensor]:
    """A pipeline that was called before (transformers installs hooks of its own then), and its picture at level 0.

    All faults happen to the same one: after each it is as it was before.
    """
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    run(pipe, case)
    fitted = tightfit.fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted.undo()
    tightfit.fit(
        pipe, **choices(pipe, case, "budget"), device="cuda"
    ).undo()  # measured and planned while nothing fails
    return case, pipe, wanted


def happened(fault: Fault) -> bool:
    """Lets it happen, if there is such a call, and looks at what comes of it."""
    try:
        return _happened(fault, *prepared())
    except BaseException:
        prepared.cache_clear()  # whatever state it is in
        raise


def _happened(fault: Fault, case: TinyCase, pipe: Any, wanted: torch.Tensor) -> bool:
    start_libraries()
    card, before = card_state(), imprint(pipe)
    chosen = choices(pipe, case, fault.chosen)
    filling = fill_cache()  # so that memory is asked of the driver
    seen = driver.count("faults"), driver.count("refused")
    found, error, fitted = attempt(pipe, case, chosen, fault)
    try:
        if error is None:
            assert_right(found, wanted, fitted)
        else:
            assert_clear(error, fault)
        had = (driver.count("faults"), driver.count("refused")) != seen
        if fitted is not None:  # the fault is over, and so is what it did
            assert_right(run(pipe, case).cpu(), wanted, fitted)
    finally:  # its cap would fail the tests after it
        if fitted is not None:
            fitted.undo()
    assert_same(before, imprint(pipe))
    del fitted, filling  # schedulers keep tensors on the card
    assert_nothing_left(card)
    return had


def start_libraries() -> None:
    """cuBLAS keeps a workspace on each card from its first product on; up to torch 2.11 cuBLASLt has its own."""
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(8, 8, device=f"cuda:{index}")
        torch.addmm(ones[0], ones @ ones, ones)


def choices(pipe: Any, case: TinyCase, name: str) -> dict[str, Any]:
    if name == "budget":
        return {"budget": SIZE, "request": request_of(pipe, (), case.call())}
    return {"plan": STREAMED} if name == "level 3" else {"level": 0}


def attempt(pipe: Any, case: TinyCase, chosen: dict[str, Any], fault: Fault) -> tuple[Any, Any, Any]:
    """Output, error (its class and words) and what was fitted, of `fit` and a call in one of which `fault` happens."""
    fitted = found = filling = None
    try:
        with driver.faults(**(fault.settings if fault.when == "fit" else {})):
            fitted = tightfit.fit(pipe, **chosen, device="cuda")
        filling = fill_cache() if fault.when == "call" else []
        with driver.faults(**(fault.settings if fault.when == "call" else {})):
            found = run(pipe, case).cpu()
    except Exception as raised:  # its frames would keep tensors
        return found, (type(raised), str(raised)), fitted
    finally:
        del filling
    return found, None, fitted


def assert_right(found: torch.Tensor, wanted: torch.Tensor, fitted: tightfit.Fitted) -> None:
    """The same to the bit; strips, which a pipeline that could not be measured is run in, sum in another order."""
    if fitted.plan.vae.strips is None:
        assert torch.equal(found, wanted)
    else:
        assert relative_error(found, wanted) <= 1e-5


def assert_clear(error: tuple[type, str], fault: Fault) -> None:
    kind, said = error
    ours = issubclass(kind, TightfitError)
    memory = issubclass(kind, torch.OutOfMemoryError) and re.search("out of memory", fault.error)
    assert ours or memory or re.search(fault.error, said), f"{kind.__name__}: {said[:500]}"
