"""Attention with a mask: torch tries cuDNN first on some cards, and footprints are measured on a card of no kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tightfit.catalog.known import known_card
from tightfit.schema.machine import Accelerator
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.timeline import Host

UNKNOWN = Accelerator(name="any card", kind="simulated", bytes=2**40)
HERE = torch.device(NAME, 0)
MASKED = (1, 2, 64, 64)  # queries, keys and values: (items, heads, tokens, width)


def kinds_on(accelerator: Accelerator, *, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    card, seen = SimulatedCard(0, accelerator, Host()), list[KernelCost]()
    use_cards([card])
    try:
        card.kernel_callbacks.append(seen.append)
        query = torch.zeros((*MASKED[:3], width), dtype=dtype, device=HERE)
        mask = torch.ones((1, 1, MASKED[2], MASKED[2]), dtype=torch.bool, device=HERE)
        with torch.no_grad():
            F.scaled_dot_product_attention(query, query, query, mask)
    finally:
        use_cards([])
    return {work.kind for work in seen if work.kind.endswith("attention")}


@pytest.mark.parametrize(
    ("card", "kind"),
    [("h100", "attention"), ("rtx4090", "efficient-attention"), (None, "cudnn-first-attention")],
)
def test_a_masked_call_is_of_the_kind_of_the_kernel_that_torch_takes(card: str | None, kind: str) -> None:
    accelerator = UNKNOWN if card is None else known_card(card).model_copy(update={"kind": "simulated"})
    assert kinds_on(accelerator) == {kind}


@pytest.mark.parametrize(("width", "dtype"), [(160, torch.bfloat16), (64, torch.float32)])
def test_what_cudnn_does_not_take_is_efficient_attention_on_every_card(width: int, dtype: torch.dtype) -> None:
    assert kinds_on(UNKNOWN, width=width, dtype=dtype) == {"efficient-attention"}


@pytest.mark.parametrize(("capability", "rate"), [("9.0", 3e14), ("10.0", 3e14), ("8.9", 1e14), (None, 1e14)])
def test_its_rate_is_that_of_the_kernel_which_a_card_takes(capability: str | None, rate: float) -> None:
    rates = {"attention.bfloat16": 3e14, "efficient-attention.bfloat16": 1e14}
    card = UNKNOWN.model_copy(update={"arithmetic_rates": rates, "compute_capability": capability})
    assert card.arithmetic_rate("cudnn-first-attention", "bfloat16") == rate
    assert card.arithmetic_rate("efficient-attention", "bfloat16") == 1e14
