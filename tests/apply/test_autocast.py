"""Autocast keeps the cast copy of each weight that it has seen: of weights that come and go, none is left."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit import fit

LAYERS, WIDTH = 6, 512


class Casts(TorchDispatchMode):
    """Cast copies of whole weights."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0  # that lived at a time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (WIDTH, WIDTH):
            self.made.append(weakref.ref(result))
            self.most = max(self.most, self.alive)
        return result

    @property
    def alive(self) -> int:
        return sum(cast() is not None for cast in self.made)


@torch.no_grad()  # a graph for gradients would hold them too
@pytest.mark.parametrize("store", ["cpu", "disk"])
@pytest.mark.parametrize("placement", ["stream", "offload"])
def test_cast_copies_of_weights_that_come_and_go_do_not_pile_up(placement: str, store: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(2, WIDTH)
    part: dict[str, Any] = {"placement": placement, "offload_to": store}
    if placement == "stream":
        part |= {"resident_layers": [], "ring_buffer": 2 * (4 * WIDTH * WIDTH + 5 * 4096)}
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
    fitted = fit(model, plan={"components": {"model": part}}, device="loopback", count_activations=False)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        assert len(casts.made) >= LAYERS
        if placement == "stream":
            assert casts.most <= 2  # of layers that are both in the ring
        fitted.undo()
        assert casts.alive == 0
