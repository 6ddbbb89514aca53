"""Autoencoders strip by strip: the same numbers, whoever's they are, and the less memory the more strips there are."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tightfit import fit
from tiny_autoencoders import CASES, TinyAutoencoder, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SMALL = [case for case in CASES if not case.large]
ROUNDING = 1e-5  # of the largest value, float32
AS_SMALL_AS_CAN_BE, ONE_STRIP = 1, 10**12  # bytes

# why these run whole: by parts of their names
WHOLE = {
    "AutoencoderRAE": "has one size only",
}


def rows_of(case: TinyAutoencoder) -> int:
    return case.only_rows or max(7 // case.granule * case.granule, case.least_rows)


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[TinyAutoencoder, nn.Module]:
    case = next(case for case in SMALL if case.name == name)
    return case, case.make().eval()


def both(case: TinyAutoencoder, model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    rows = rows_of(case)
    torch.manual_seed(0)
    made = {"decode": decode(model, case, case.latents(rows, batch), batch)}
    return made | ({"encode": encode(model, case.pixels(rows, batch))} if case.encodes else {})


@pytest.mark.parametrize("name", [case.name for case in SMALL])
def test_strips_give_the_same_numbers(name: str) -> None:
    case, model = prepared(name)
    whole = both(case, model, 1)
    for strips in (AS_SMALL_AS_CAN_BE, ONE_STRIP):
        fitted = fit(model, plan={"vae": {"strips": strips}}, device="cpu")
        in_strips = both(case, model, 1)
        notes = fitted.report().trace.notes
        fitted.undo()
        for method, want in whole.items():
            assert float((in_strips[method] - want).abs().max()) <= ROUNDING * float(want.abs().max()), (method, strips)
            assert notes == (), name
