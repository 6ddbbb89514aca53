"""What grows with a picture's height among a denoiser's inputs, by their shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs
from tightfit.apply.context_parallel.parallel_method import ParallelMethod
from tiny_pipelines import CASES

if TYPE_CHECKING:
    from tightfit.apply.context_parallel.parallel_method import RowSharing
    from tightfit.measure.recorder import Recorder


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


def test_a_call_of_another_form_than_the_simulated_one_is_guessed() -> None:
    unet = CASES[0].make().unet
    call = ComponentArguments((torch.empty(2, 4, 16, 16), 1), {"encoder_hidden_states": torch.empty(2, 16, 16)})
    alone = cast("RowSharing", None)
    method = ParallelMethod(type(unet), "unet", "forward", alone, cast("Recorder", None), DoubledInputs("other", ()))
    program, _ = method._take_apart(unet, call)
    assert {node.rows for node in program.nodes if node.axis is not None} > {16}
    other = ComponentArguments((torch.empty(2, 5, 16, 16), 1), call.kwargs)
    with pytest.raises(UnsupportedGraph, match="not with other as in the recorded call"):
        method._take_apart(unet, other)


def test_nothing_is_guessed_of_a_call_without_rows() -> None:
    assert not list(DoubledInputs.guesses(ComponentArguments((tensor(2, 77), 3), {})))
