"""What grows with a picture's height among a denoiser's inputs, by their shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("call", "twice"),
    [
        ((tensor(2, 4, 8, 6), 7.0, tensor(2, 77, 16)), (tensor(2, 4, 16, 6), 7.0, tensor(2, 77, 16))),
        ((tensor(2, 5, 4, 8, 6), (tensor(60, 16),) * 2), (tensor(2, 5, 4, 16, 6), (tensor(120, 16),) * 2)),
        ((tensor(1, 48, 64), tensor(1, 77, 64), tensor(48, 3)), (tensor(1, 96, 64), tensor(1, 77, 64), tensor(96, 3))),
        ((tensor(1, 96, 64), 2, 8, 6, tensor(1, 9, 64)), (tensor(1, 192, 64), 2, 16, 6, tensor(1, 9, 64))),
        (
            (tensor(1, 48, 64), tensor(1, 77, 64), tensor(1, 125)),
            (tensor(1, 96, 64), tensor(1, 77, 64), tensor(1, 173)),
        ),
        ((tensor(1, 96, 64), tensor(1, 96), 8), (tensor(1, 192, 64), tensor(1, 192), 16)),
    ],
    ids=[
        "maps",
        "maps and tables of positions",
        "tokens",
        "tokens and their height",
        "tokens and a mask of all",
        "tokens and a time for each",
    ],
)
def test_one_of_the_guesses_is_the_call_at_twice_the_height(call: tuple[Any, ...], twice: tuple[Any, ...]) -> None:
    own = ComponentArguments(call, {})
    right = DoubledInputs.of(own, ComponentArguments(twice, {}))
    assert right in list(DoubledInputs.guesses(own))


def test_nothing_is_guessed_of_a_call_without_rows() -> None:
    assert not list(DoubledInputs.guesses(ComponentArguments((tensor(2, 77), 3), {})))
