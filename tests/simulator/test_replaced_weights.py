"""Weights that a network makes anew on the simulated card go to host memory with the others."""

from __future__ import annotations

import pytest
import torch

from replaced_weights import PLACEMENTS, check_renewed
from simulator.conftest import MakeCards


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_network_renews_goes_home(placement: str, make_cards: MakeCards) -> None:
    make_cards()
    with torch.no_grad():
        check_renewed(placement, "simulated:0", torch.rand(2, 64).to("privateuseone:0"))
