"""Whole pipelines on simulated cards: the CPU's numbers, at every level, and a hard limit."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from a_few import a_few
from simulator.conftest import MakeCards
from tightfit import fit
from tightfit.simulator.allocator_replay import least_capacity
from tightfit.simulator.storage import free_dead_tensors
from tiny_pipelines import CASES, TinyCase, run

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def cases(*names: str) -> Any:
    return pytest.mark.parametrize("case", [case for case in CASES if case.name in names], ids=lambda case: case.name)


some_cases = cases("StableDiffusion", "Flux", "Wan")
more_cases = cases("StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "Flux", "Wan", "LTX")


@functools.cache
def on_the_cpu(case: TinyCase) -> torch.Tensor:
    return run(case.make(), case)


@pytest.mark.one_in(4)
@every_case
def test_numbers_are_those_of_the_cpu(case: TinyCase, make_cards: MakeCards) -> None:
    _, card = make_cards(2)
    assert torch.equal(run(case.make().to("privateuseone:1"), case).cpu(), on_the_cpu(case))
    assert card.allocator.allocated.peak > 0


def _split(pipe: Any) -> None:
    """Puts every other network on the second card; what goes in and out of networks is moved."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for index, part in enumerate(parts.values()):
        part.to(f"privateuseone:{index % 2}")
    store = pipe.device
    parts.pop("vae").to(store)  # it is not called but asked to decode
    for part in parts.values():
        part.register_forward_pre_hook(
            lambda part, args, kwargs: _moved((args, kwargs), next(part.parameters()).device), with_kwargs=True
        )
        part.register_forward_hook(lambda part, args, output: _moved(output, store))


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


@pytest.mark.one_in(4)
@every_case
def test_numbers_are_those_of_the_cpu_over_two_cards(case: TinyCase, make_cards: MakeCards) -> None:
    cards = make_cards(2)
    pipe = case.make()
    _split(pipe)
    assert torch.equal(run(pipe, case).cpu(), on_the_cpu(case))
    assert all(card.allocator.allocated.peak > 0 for card in cards)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", a_few([0, 1, 2, 3], "3"))
@more_cases
def test_a_level_holds_a_hard_limit(case: TinyCase, level: int, make_cards: MakeCards) -> None:
    pipe = case.make()
    fit(pipe, level=level, device="loopback")
    wanted = run(pipe, case)
    (card,) = make_cards()
    pipe = case.make()
    fitted = fit(pipe, level=level, device="simulated:0")
    assert torch.equal(run(pipe, case).cpu(), wanted)
    fitted.undo()
    need = least_capacity(card.allocator.history)
    for capacity in (need, need - 1):
        make_cards(capacity=capacity)
        pipe = case.make()
        if capacity == need:
            fit(pipe, level=level, device="simulated:0")
            assert torch.equal(run(pipe, case).cpu(), wanted)
        else:
            with pytest.raises(torch.OutOfMemoryError, match=r"simulated:0 is out of memory\. Tried to allocate"):
                _fit_and_run(pipe, case, level)


def _fit_and_run(pipe: Any, case: TinyCase, level: int) -> None:
    fit(pipe, level=level, device="simulated:0")
    run(pipe, case)


@pytest.mark.one_in(3)
@some_cases
def test_undo_leaves_nothing_on_the_card(case: TinyCase, make_cards: MakeCards) -> None:
    (card,) = make_cards()
    pipe = case.make()
    fitted = fit(pipe, level=0, device="simulated:0")
    run(pipe, case)
    fitted.undo()
    del pipe, fitted
    gc.collect()
    free_dead_tensors()
    assert card.allocator.allocated.now == card.workspace_bytes


@some_cases
def test_time_is_the_same_every_time(case: TinyCase, make_cards: MakeCards) -> None:
    times = []
    for _ in range(2):
        (card,) = make_cards()
        pipe = case.make()
        fit(pipe, level=3, device="simulated:0")
        run(pipe, case)
        times.append(card.now)
    assert times[0] == times[1] > 0
