"""Each tiny pipeline on a card: the numbers of level 0 whatever moves, and a card that is as before after `undo()`.

On the stub of a card also: copies that come as late as they may, no races, no hazards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tightfit
from card_state import assert_nothing_left, card_state
from inspection import Imprint, assert_same, imprint, relative_error
from tightfit.devices.cuda_support import cuda_count
from tightfit.errors import BudgetTooSmall
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import request_of
from tightfit.run.planning_context import measured_machine
from tiny_pipelines import CASES, FRAMES, TinyCase, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

MIB = 2**20
SIZE = 512 * MIB
ON_DISK = {"offload_to": "disk", "placement": "stream"}
PINNED = {"offload_to": "cpu", "pinned": True, "placement": "stream"}
PLAIN = {"offload_to": "cpu", "pinned": False, "placement": "stream"}
PHASES = {"placement": "offload"}
WAYS = ("level 0", "level 3", "the least budget", "disk")
MORE_WAYS = ("level 1", "level 2", "a large budget", "pinned", "plain", "phases", "waiting activations")


def choices(pipe: Any, case: TinyCase, way: str) -> dict[str, Any]:
    """What `fit` is given."""
    components = find_components(pipe)
    if way.endswith("budget"):
        measured_machine()  # leaves cuBLAS's workspace on each card, the first time
        request = request_of(pipe, (), case.call()) or tightfit.Request()
        if "video" in case.call():
            request = request.model_copy(update={"frames": FRAMES})
        return {"budget": SIZE if "large" in way else least_budget(pipe, request), "request": request}
    if way.startswith("level"):
        return {"plan": {"level": int(way[-1]), "vae": {"slicing": False}}}
    plans = {
        "waiting activations": {"level": 0, "offload_activations": True},
        "phases": {"components": dict.fromkeys(components, PHASES)},
        "disk": {"components": dict.fromkeys(components, ON_DISK)},
        "pinned": {"components": dict.fromkeys(components, PINNED)},
        "plain": {"components": dict.fromkeys(components, PLAIN)},
    }
    return {"plan": plans[way]}


def least_budget(pipe: Any, request: tightfit.Request) -> int:
    with pytest.raises(BudgetTooSmall) as raised:
        tightfit.fit(pipe, budget=MIB, request=request, device="cuda")
    return int(raised.value.facts["needed_bytes"])


@contextlib.contextmanager
def fitted_as(pipe: Any, **chosen: Any) -> Iterator[Any]:
    fitted = tightfit.fit(pipe, **chosen, device="cuda")
    try:
        yield fitted
    finally:
        fitted.undo()


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[Any, Imprint, torch.Tensor]:
    """A pipeline that was called before, its imprint, and its picture at level 0: for one plan after another."""
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    run(pipe, case)  # transformers installs hooks of its own at the first call
    before = imprint(pipe)
    with fitted_as(pipe, level=0):
        return pipe, before, run(pipe, case).cpu()


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.full) for way in MORE_WAYS)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_moves_the_numbers_are_those_of_level_0(case: TinyCase, way: str) -> None:
    try:
        check(case, way)
    except BaseException:
        prepared.cache_clear()  # whatever state the pipeline is in
        raise


def check(case: TinyCase, way: str) -> None:
    pipe, before, wanted = prepared(case.name)
    chosen = choices(pipe, case, way)
    card = card_state()
    with fitted_as(pipe, **chosen) as fitted:
        exact = fitted.plan.vae.strips is None  # strips of another height: other sums
        for _ in range(2):
            found = run(pipe, case).cpu()
            assert torch.equal(found, wanted) if exact else relative_error(found, wanted) <= 1e-5
        assert fitted.report().trace.lossy == ()
    del fitted
    assert_same(before, imprint(pipe))
    assert_nothing_left(card)
