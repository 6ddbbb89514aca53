"""Eight bits on simulated cards: floats in tensors and modules, and stored weights, int8 too."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from a_few import a_few
from simulator.conftest import MakeCards
from tightfit import fit
from tiny_pipelines import CASES, TinyCase, run

STORAGES = ["float8_e4m3fn", "float8_e5m2", *(["int8"] if find_spec("torchao") else [])]
every_storage = pytest.mark.parametrize("form", STORAGES)
every_form = pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))


@every_form
def test_there_and_back(form: torch.dtype, make_cards: MakeCards) -> None:
    make_cards(2)
    wide = torch.linspace(-9, 9, 24).reshape(4, 6)
    narrow = wide.to(form)
    there = narrow.to("privateuseone:0")
    assert same(there, narrow)
    assert same(wide.to("privateuseone:0").to(form), narrow)
    assert same(wide.to("privateuseone:1", form), narrow)
    assert same(there.to("privateuseone:1"), narrow)
    assert torch.equal(there.to(torch.bfloat16).cpu(), narrow.to(torch.bfloat16))
    assert torch.equal(there.to("cpu", torch.float32), narrow.float())
    assert same(torch.empty_like(there).copy_(wide), narrow)
    assert same(there[1:, 2:4].t().reshape(-1), narrow[1:, 2:4].t().reshape(-1))
    assert torch.equal(there.view(torch.uint8).cpu(), narrow.view(torch.uint8))
    assert same(torch.cat([there, there]), torch.cat([narrow, narrow]))


@every_form
@pytest.mark.parametrize("values", ["real", "shapes"])
def test_factories(form: torch.dtype, values: Any, make_cards: MakeCards) -> None:
    (card,) = make_cards(values=values)
    with torch.device("privateuseone"):
        made = [torch.empty(2**20, dtype=form), torch.zeros(2**20, dtype=form), torch.ones(2**20, dtype=form)]
        made += [torch.full((2**20,), 2.0, dtype=form), torch.empty_strided((1024, 1024), (1, 1024), dtype=form)]
    assert all((tensor.dtype, tensor.device.type) == (form, "privateuseone") for tensor in made)
    assert card.allocator.allocated.now == 5 * 2**20


@every_form
def test_modules(form: torch.dtype, make_cards: MakeCards) -> None:
    make_cards(2)
    store = nn.Linear(6, 4, dtype=torch.float32)
    state = {name: value.to(form) for name, value in store.state_dict().items()}
    for assign in (False, True):
        there = nn.Linear(6, 4).to("privateuseone:1", form)
        there.load_state_dict({name: value.to("privateuseone:1") for name, value in state.items()}, assign=assign)
        assert same(there.weight.detach(), state["weight"])
        assert same(there.to("privateuseone:0").weight.detach(), state["weight"])
    wanted = nn.functional.linear(torch.ones(1, 6), *(value.float() for value in state.values()))
    assert torch.equal(there.float()(torch.ones(1, 6, device="privateuseone:0")).cpu(), wanted)
    assert same(there.to(form).cpu().weight.detach(), state["weight"])


def stored(case: TinyCase, form: str | None, device: Any) -> tuple[torch.Tensor, Any]:
    pipe: Any = case.make()
    network = "unet" if hasattr(pipe, "unet") else "transformer"
    choices = {"placement": "stream"} | ({"storage": form} if form else {})
    fitted = fit(pipe, plan={"components": {network: choices}}, device=device)
    return run(pipe, case), fitted.report().trace


# rows and scales begin at multiples of 128 bytes, which is much beside LTX's tiny weights
MOST = {"StableDiffusionXL": 0.8, "Flux": 0.8, "LTX": 0.82}


@every_storage
@pytest.mark.parametrize("name", a_few(MOST, "Flux"))
def test_stored_weights_give_the_loopbacks_numbers(name: str, form: str, make_cards: MakeCards) -> None:
    case = next(case for case in CASES if case.name == name)
    wanted, _ = stored(case, form, "loopback")
    (as_loaded,) = make_cards()
    numbers, _ = stored(case, None, "privateuseone:0")
    assert not torch.equal(numbers.cpu(), wanted)
    (narrow,) = make_cards()
    numbers, trace = stored(case, form, "privateuseone:0")
    assert torch.equal(numbers.cpu(), wanted)
    assert any(form in lossy for lossy in trace.lossy)
    if form != "int8":  # which leaves kernels as they are
        assert narrow.bytes_in < MOST[name] * as_loaded.bytes_in


class Wide(nn.Module):
    """Blocks of 256 KiB each in float32, beside whose weights scales and biases are little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.parametrize("placement", ["offload", "stream"])
@every_storage
def test_stored_weights_travel_as_they_are_stored(form: str, placement: str, make_cards: MakeCards) -> None:
    x = torch.randn(2, 256)

    def worked(storage: str, device: str) -> torch.Tensor:
        module = Wide()
        fit(module, plan={"components": {"model": {"placement": placement, "storage": storage}}}, device=device)
        with torch.no_grad():
            return module(x.to("cpu" if device == "loopback" else device)).cpu()

    (as_loaded,) = make_cards()
    wide = worked("as-loaded", "privateuseone:0")
    (narrow,) = make_cards()
    numbers = worked(form, "privateuseone:0")
    assert torch.equal(numbers, worked(form, "loopback"))
    assert not torch.equal(numbers, wide)
    assert 0.25 * as_loaded.bytes_in < narrow.bytes_in < 0.27 * as_loaded.bytes_in  # a quarter, and the scales


@pytest.mark.parametrize("kind", ["simulated", "cpu"])
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
@every_storage
def test_stored_shapes_take_the_bytes_of_stored_weights(
    form: str, placement: str, kind: str, make_cards: MakeCards
) -> None:
    make_cards(values="shapes", kind=kind)
    with torch.device("meta"):
        module = Wide()
    fitted = fit(
        module, plan={"components": {"model": {"placement": placement, "storage": form}}}, device="simulated:0"
    )
    with torch.no_grad():
        assert module(torch.empty(2, 256, device="privateuseone:0")).shape == (2, 256)
    trace = fitted.report().trace
    assert 0 < trace.phases[0].peak_weights < 1.1 * 24 * 256 * 256
    assert any(form in lossy for lossy in trace.lossy)
    fitted.undo()
    assert all(parameter.is_meta and type(parameter) is nn.Parameter for parameter in module.parameters())
