"""What the host does again for weights in each pass, and what it does once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tightfit import fit
from tightfit.apply.weights.offloaded_parameter import LazyWeights
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.device import LoopbackDevice

LAYERS, PASSES = 9, 12
X = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """As pipelines call networks."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("resident", [0, 4, LAYERS])
def test_weights_are_made_of_their_bytes_once_for_each_place(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    views = WeightGroup.views
    monkeypatch.setattr(WeightGroup, "views", lambda self, region: made.append(self.name) or views(self, region))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS)))
    wanted, size = model(X), sum(p.nbytes for p in model[0].parameters()) + 4096
    part = {
        "placement": "stream",
        "resident_layers": [str(n) for n in range(resident)],
        "ring_buffer": 3 * size,
        "granularity": "layer",
    }
    fitted = fit(model, plan={"components": {"model": part}}, device=LoopbackDevice())
    for _ in range(PASSES):
        assert torch.equal(model(X), wanted)
    assert len(made) <= 3 * LAYERS  # three places in the ring
    settled = len(made)
    assert torch.equal(model(X), wanted)
    assert len(made) == settled
    with torch.no_grad():
        model[0].weight.zero_()  # what others write is used all the same
    changed = model(X)
    assert not torch.equal(changed, wanted)
    fitted.undo()
    assert torch.equal(model(X), changed)


def test_what_others_wrote_is_not_kept_on_the_device_for_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[weakref.ref[torch.Tensor]]()
    with_written = LazyWeights.with_written

    def remembered(self: LazyWeights, group: WeightGroup, weights: Any) -> Any:
        found = with_written(self, group, weights)
        made.extend(weakref.ref(weight) for weight, was in zip(found, weights, strict=True) if weight is not was)
        return found

    monkeypatch.setattr(LazyWeights, "with_written", remembered)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS)))
    part = {"placement": "stream", "resident_layers": [], "ring_buffer": 4 * 2**20, "granularity": "layer"}
    fitted = fit(model, plan={"components": {"model": part}}, device=LoopbackDevice())
    model(X)

    def write(*_: object) -> None:
        model[0].weight.zero_()

    hook = model[-1].register_forward_hook(write)  # within a call: after one, the source parameters are written to
    model(X)
    hook.remove()
    model(X)
    assert made
    assert not any(weight() is not None for weight in made)
    fitted.undo()
