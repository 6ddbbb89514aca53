"""Small neighbouring layers come together, once a pass, and are used one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightfit import fit
from tightfit.devices.device import LoopbackDevice
from tightfit.errors import PlanError
from tightfit.measure.modules import inspect_component
from tightfit.plan.layer_selection import group_layers, resolve_streaming, weight_group_sizes
from tightfit.schema.plan import ComponentPlan

X = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
BLOCKS, PASSES = 6, 4


class Attention(nn.Module):
    """Layers that are used in the order in which they are defined, or not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(128, 128) for _ in range(4))
        self.skips: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            x = x if name == self.skips else torch.tanh(layer(x))
        return x


class Network(nn.Module):
    """Blocks of small layers, and a large one, beside which they are small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.large = nn.Linear(128, 2**15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.large(x)  # type: ignore[no-any-return]


def plan_of(model: nn.Module, *, resident: tuple[str, ...] = ("large",), ring: int = 3) -> tuple[ComponentPlan, int]:
    """Some layers stay, the others pass through a ring that holds so many of the largest; and the bytes of those."""
    component = inspect_component("model", model)
    chosen = ComponentPlan(placement="stream", granularity="layer", resident_layers=resident)
    sizes = weight_group_sizes(component, "layer", chosen)
    settled = resolve_streaming(component, chosen)
    passing = {name: size for name, size in sizes.items() if name not in (settled.resident_layers or ())}
    weights = {layer.name: layer.bytes for layer in component.layers}
    groups = group_layers(component, "layer")
    size = sum(weights[layer] for name in passing for layer in groups[name])
    return settled.model_copy(update={"ring_buffer": ring * max(passing.values())}), size


def test_what_moves_together_is_a_blocks() -> None:
    groups = group_layers(inspect_component("model", Network()), "layer")
    names = ("query", "key", "value", "out")
    assert list(groups.values()) == [*([f"blocks.{n}.{name}" for name in names] for n in range(BLOCKS)), ["large"]]
    assert len(group_layers(inspect_component("model", Network()), "block")) == BLOCKS + 1


@pytest.mark.parametrize("ring", [1, 3])
@pytest.mark.parametrize("skips", [None, "key", "out"])
def test_each_comes_once_in_a_pass(skips: str | None, ring: int) -> None:
    model = Network()
    for block in model.blocks:
        block.skips = skips
    with torch.no_grad():
        wanted = model(X)
    chosen, size = plan_of(model, ring=ring)
    fitted = fit(model, plan={"components": {"model": chosen}}, device=LoopbackDevice())
    brought = []
    for _ in range(PASSES):
        with torch.no_grad():
            assert torch.equal(model(X), wanted)
        brought.append(sum(phase.bytes_in for phase in fitted.report().trace.phases))
    fitted.undo()
    large = sum(weight.nbytes for weight in model.large.parameters())
    assert size + large < brought[0] <= size + large + (chosen.ring_buffer or 0), (
        "in the first pass, and ahead for the next"
    )
    assert set(brought[1:]) == {size}


def test_one_that_is_named_stays_with_those_that_move_with_it() -> None:
    component = inspect_component("model", Network())
    for name in ("blocks.1.query", "blocks.1.value"):
        chosen = ComponentPlan(placement="stream", granularity="layer", resident_layers=(name,))
        assert resolve_streaming(component, chosen).resident_layers == ("blocks.1.query",)
    with pytest.raises(PlanError, match=r"did you mean 'blocks\.1\.value'"):
        resolve_streaming(
            component, ComponentPlan(placement="stream", granularity="layer", resident_layers=("blocks.1.valeu",))
        )


def test_what_shares_its_weights_comes_by_itself() -> None:
    model = Network()
    model.blocks[2].out.weight = model.blocks[0].key.weight
    groups = group_layers(inspect_component("model", model), "layer")
    assert groups["blocks.0.key"] == ["blocks.0.key"]
    assert groups["blocks.0.query"] == ["blocks.0.query"]
    assert groups["blocks.0.value"] == ["blocks.0.value", "blocks.0.out"]
    assert groups["blocks.2.query"] == [f"blocks.2.{name}" for name in ("query", "key", "value")]


def test_the_same_layers_come_together_while_a_plan_is_followed() -> None:
    """Blocks that plans override the methods of still count as several of one class."""
    model = nn.Sequential()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(3))
    model.last = nn.LayerNorm(512)
    before = inspect_component("model", model)
    fitted = fit(model, plan={"level": 0}, device=LoopbackDevice())
    assert type(model.blocks[0]) is not nn.Sequential
    assert inspect_component("model", model).layers == before.layers
    fitted.undo()
