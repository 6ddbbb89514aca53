"""find_leaves: which layers can move by themselves, and which had better stay whole or be left alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tightfit.measure.modules import SMALLEST, SMALLEST_SHARE, find_layers, inspect_component


class Own(nn.Module):
    """Owns a parameter, and has whatever children it is given. Uses its own parameter all along."""

    def __init__(self, *shape: int, **children: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(*shape))
        for name, child in children.items():
            self.add_module(name, child)


class Parts(nn.Module):
    """Owns nothing itself."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear(width: int = 32, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, width, bias=bias)


def layers(module: nn.Module) -> dict[str, int]:
    """How many modules each leaf has."""
    return {name: len(parts) for name, parts in find_layers(module).items()}


# what there is to move


@pytest.mark.parametrize("module", [nn.Module(), nn.ReLU(), nn.ModuleList(), Parts(a=Parts(), b=nn.ModuleList())])
def test_where_there_are_no_weights_there_are_no_leaves(module: nn.Module) -> None:
    assert find_layers(module) == {}


def test_layers_are_found_by_path_in_the_order_of_the_model() -> None:
    model = Parts(last=linear(), first=Parts(up=linear(), down=nn.Conv2d(8, 8, 3)), table=nn.Embedding(64, 16))
    found = find_layers(model)
    assert list(found) == ["last", "first.up", "first.down", "table"]
    assert all(parts == (model.get_submodule(name),) for name, parts in found.items())


def test_elements_of_lists_are_found_and_lists_are_not() -> None:
    model = Parts(
        blocks=nn.ModuleList(Parts(up=linear(), down=linear()) for _ in range(2)), plain=nn.ModuleList([linear()])
    )
    names = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "plain.0"]
    assert layers(model) == dict.fromkeys(names, 1)


def test_a_sequence_and_a_dictionary_are_looked_into() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), nn.ModuleDict({"a": linear()}))
    assert layers(model) == {"0": 1, "2.a": 1}


def test_a_layer_that_is_there_twice_is_one() -> None:
    layer = linear()
    assert layers(Parts(a=layer, b=Parts(c=layer), d=linear())) == {"a": 1, "d": 1}


def test_buffers_do_not_make_a_leaf() -> None:
    model = Parts(a=linear(), norm=nn.BatchNorm2d(64, affine=False))
    model.norm.register_buffer("table", torch.zeros(100, 100))
    assert layers(model) == {"a": 1}


def test_a_component_counts_what_its_leaves_own() -> None:
    model = Parts(a=linear(bias=True), b=Own(64, 64), small=nn.LayerNorm(1))
    component = inspect_component("model", model)
    assert {layer.name: layer.bytes for layer in component.layers} == {"a": 32 * 33 * 4, "b": 64 * 64 * 4}
    assert component.bytes == sum(layer.bytes for layer in component.layers) + 8
    assert component.layers[0].dtypes == {"float32": 32 * 33 * 4}


# what is needed all along


def test_what_has_leaves_inside_is_none_itself() -> None:
    model = Parts(block=Own(64, 64, inside=linear(), deep=Parts(er=linear())), beside=linear())
    assert layers(model) == {"block.inside": 1, "block.deep.er": 1, "beside": 1}


def test_what_has_only_small_layers_inside_is_one() -> None:
    model = Parts(block=Own(64, 64, norm=nn.LayerNorm(2)), beside=linear())
    assert layers(model) == {"block": 1, "beside": 1}


def test_what_the_model_itself_owns_is_needed_all_along() -> None:
    assert layers(Own(64, 64, inside=linear())) == {"inside": 1}


def test_names_that_begin_alike_are_not_inside_each_other() -> None:
    assert layers(Parts(up=linear(), up_2=linear(), u=Own(64, 64))) == {"up": 1, "up_2": 1, "u": 1}


# what is small


@pytest.mark.parametrize(
    ("more", "found"), [(-4, {"large": 1}), (0, {"large": 1, "edge": 1}), (4, {"large": 1, "edge": 1})]
)
def test_of_large_models_a_leaf_has_a_mebibyte(more: int, found: dict[str, int]) -> None:
    with torch.device("meta"):
        model = Parts(large=Own(1000 * SMALLEST // 4 + 1), edge=Own((SMALLEST + more) // 4))
    assert layers(model) == found


@pytest.mark.parametrize(("numbers", "found"), [(9, {"large": 1}), (10, {"large": 1, "edge": 1})])
def test_of_small_models_a_leaf_has_its_share(numbers: int, found: dict[str, int]) -> None:
    model = Parts(large=Own(10_000 - numbers), edge=Own(numbers))
    assert SMALLEST_SHARE * 10_000 == 10
    assert layers(model) == found


def test_a_layer_counts_with_all_that_it_owns() -> None:
    two = Own(5)
    two.other = nn.Parameter(torch.zeros(5))
    assert layers(Parts(large=Own(9_990), two=two)) == {"large": 1, "two": 1}


def test_of_tiny_models_everything_counts_that_has_any_bytes() -> None:
    assert layers(Parts(a=Own(1), b=Own(0), c=nn.ReLU())) == {"a": 1}


# what is shared


def test_layers_that_share_a_weight_are_one_leaf() -> None:
    model = Parts(table=nn.Embedding(64, 32), between=linear(), head=nn.Linear(32, 64, bias=False))
    model.head.weight = model.table.weight
    found = find_layers(model)
    assert found == {"table": (model.table, model.head), "between": (model.between,)}
    component = inspect_component("model", model)
    assert component.layers[0].bytes == 64 * 32 * 4  # once


def test_what_is_shared_moves_with_all_that_its_owners_have() -> None:
    model = Parts(a=linear(bias=True), b=linear(bias=True), c=linear(bias=True))
    model.b.weight, model.c.bias = model.a.weight, model.b.bias
    assert find_layers(model) == {"a": (model.a, model.b, model.c)}


def test_a_weight_that_a_layer_has_twice_is_its_own() -> None:
    layer = Own(64, 64)
    layer.again = layer.own
    assert layers(Parts(a=layer, b=linear())) == {"a": 1, "b": 1}


def test_what_is_shared_with_whoever_is_around_stays() -> None:
    model = Own(64, 64, a=Own(64, 64), b=linear())
    model.a.own = model.own
    assert layers(model) == {"b": 1}


def test_what_is_shared_within_and_beyond_the_leaves_stays() -> None:
    model = Parts(block=Own(64, 64, inside=linear()), a=Own(64, 64), b=Own(64, 64), c=linear())
    model.a.own = model.b.own = model.block.own
    assert layers(model) == {"block.inside": 1, "c": 1}


def test_what_joins_two_leaves_is_in_none_or_all() -> None:
    """No weight may be in a leaf while somebody outside of it has it too."""
    first, second, both = Own(64, 64), Own(32, 64), Own(64, 64)
    both.own, both.other = first.own, second.own
    check_sharing(Parts(first=first, second=second, both=both, beside=linear()))


def owned(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module._parameters.values() if parameter is not None}


def check_sharing(model: nn.Module) -> None:
    """Every module is in one leaf at most, and no weight of a leaf is anybody else's."""
    found = find_layers(model)
    members = Counter(id(part) for parts in found.values() for part in parts)
    assert not members or max(members.values()) == 1
    for parts in found.values():
        inside = set[int]().union(*map(owned, parts))
        assert not any(owned(other) & inside for other in model.modules() if other not in parts)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Trees whose nodes own parameters of a common stock."""
    stock = [nn.Parameter(torch.zeros(size)) for size in draw(st.lists(st.integers(1, 3000), min_size=1, max_size=6))]
    count = draw(st.integers(1, 8))
    nodes = [nn.Module() for _ in range(count)]
    for index, node in enumerate(nodes):
        if index:
            nodes[draw(st.integers(0, index - 1))].add_module(f"n{index}", node)
        for number, place in enumerate(draw(st.lists(st.integers(0, len(stock) - 1), max_size=2))):
            node.register_parameter(f"p{number}", stock[place])
    return nodes[0]


@settings(deadline=None)
@given(model=models())
def test_leaves_have_their_weights_for_themselves_and_nobody_inside(model: nn.Module) -> None:
    check_sharing(model)
    found, paths = find_layers(model), dict(model.named_modules())
    parts = [part for each in found.values() for part in each]
    for name, each in found.items():
        assert each[0] is paths[name]
        assert not any(part in parts for member in each for part in [*member.modules()][1:])
    component = inspect_component("model", model)
    assert [layer.name for layer in component.layers] == list(found)
    assert sum(layer.bytes for layer in component.layers) <= component.bytes


# modules whose weights others use


def gates_that_open(model: nn.Module, *inputs: torch.Tensor) -> set[str]:
    """The leaves of `model` whose own forward pass is called when the model works."""
    opened: set[str] = set()
    handles = [
        part.register_forward_pre_hook(lambda *_, name=name: opened.add(name))
        for name, parts in find_layers(model).items()
        for part in parts
    ]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return opened


@pytest.mark.xfail(strict=True, reason="a known fault: it costs time or memory, never numbers")
@pytest.mark.parametrize("kdim", [None, 48], ids=["in one", "apart"])
def test_attention_that_uses_its_projection_without_calling_it(kdim: int | None) -> None:
    """torch's attention reads out_proj.weight: nobody would say when that is needed."""
    model = nn.Sequential(linear(64), nn.MultiheadAttention(64, 4, kdim=kdim, vdim=kdim))
    x, other = torch.zeros(3, 2, 64), torch.zeros(3, 2, kdim or 64)
    model.forward = lambda query: model[1](model[0](query), other, other)[0]
    found = find_layers(model)
    assert "0" in found
    assert gates_that_open(model, x) == set(found)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(2)])
        self.layer = linear(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = self.layer(x) + row
        return x


@pytest.mark.xfail(strict=True, reason="a known fault: it costs time or memory, never numbers")
def test_a_list_of_parameters_is_never_called() -> None:
    model = Table()
    assert gates_that_open(model, torch.zeros(64, 64)) == set(find_layers(model))
    assert "layer" in find_layers(model)
