"""Tensors that are none of the pipeline's, on the same card in the same process: a budget is for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightfit
from run.test_shrinking import REQUEST, SIZE, draw, large_unet
from simulator.conftest import ACCELERATOR
from tightfit.devices.simulated import SimulatedDevice
from tightfit.errors import BudgetTooSmall
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20


def cards_of(*sizes: int) -> list[SimulatedCard]:
    likes = [ACCELERATOR.model_copy(update={"bytes": size}) for size in sizes]
    cards = [SimulatedCard(index, like, Host(), values="real") for index, like in enumerate(likes)]
    use_cards(cards)
    return cards


def tensor_of(size: int, index: int = 0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=SimulatedDevice(index).torch_device)


def peak_of(fitted: Any, device: str = "simulated:0") -> int:
    return fitted.plan.predicted_peak(device)  # type: ignore[no-any-return]


def test_a_plan_keeps_within_what_others_leave_of_a_budget() -> None:
    wanted = draw(large_unet())
    (card,), pipe = cards_of(2 * SIZE), large_unet()
    beside = tensor_of(100 * MIB)
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")
    assert peak_of(fitted) <= SIZE - 100 * MIB
    assert (draw(pipe) - wanted).abs().max() <= 1e-5
    assert not [note for note in fitted.report().trace.notes if "out of memory" in note]
    assert card.allocator.reserved.peak <= SIZE
    assert beside.device == SimulatedDevice(0).torch_device


def test_the_pipelines_own_weights_are_none_of_the_others() -> None:
    cards_of(2 * SIZE)
    pipe = large_unet()
    alone = peak_of(tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0"))
    draw(pipe)  # cuBLAS's workspace stays
    assert peak_of(tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")) == alone


def test_a_budget_that_others_have_taken_is_refused_with_the_numbers() -> None:
    cards_of(2 * SIZE)
    beside = tensor_of(SIZE - 5 * MIB)
    with pytest.raises(
        BudgetTooSmall, match=r"250 MiB, of which other tensors of this process take 2\d\d MiB,"
    ) as refused:
        tightfit.fit(large_unet(), budget=SIZE, request=REQUEST, device="simulated:0")
    needed = refused.value.facts["needed_bytes"]
    assert needed > beside.nbytes
    tightfit.fit(large_unet(), budget=needed, request=REQUEST, device="simulated:0")


def test_what_comes_beside_a_pipeline_later_costs_one_plan() -> None:
    wanted = draw(large_unet())
    cards_of(2 * SIZE)
    pipe, there = large_unet(), list[torch.Tensor]()
    fitted = tightfit.fit(pipe, budget=SIZE, request=REQUEST, device="simulated:0")

    def happening(step: int) -> None:
        if step == 1 and not there:
            there.extend(tensor_of(20 * MIB) for _ in range(6))  # more than is free beside weights that stay

    assert (draw(pipe, happening) - wanted).abs().max() <= 1e-5
    plans = [note for note in fitted.report().trace.notes if "planned anew" in note]
    assert len(plans) <= 1, plans


def test_each_card_of_a_budget_has_its_own_others() -> None:
    cards_of(2 * SIZE, 2 * SIZE)
    beside = tensor_of(150 * MIB)
    fitted = tightfit.fit(large_unet(), budget={"simulated:0": 200 * MIB, "simulated:1": 200 * MIB}, request=REQUEST)
    assert peak_of(fitted, "simulated:0") <= 200 * MIB - beside.nbytes
    assert fitted.plan.device == "simulated:1"
