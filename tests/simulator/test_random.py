"""Random numbers on simulated cards are the CPU's, and `torch.Generator` knows the device while there are cards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from simulator.conftest import MakeCards
from tightfit.simulator.backend import use_cards
from tightfit.simulator.storage import store_of
from tiny_pipelines import CASES, run

Draw = Callable[[torch.device, torch.Generator], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "randn": lambda device, source: torch.randn(7, 5, device=device, generator=source),
    "rand": lambda device, source: torch.rand(7, device=device, generator=source, dtype=torch.float64),
    "randn in half": lambda device, source: torch.randn(7, device=device, generator=source, dtype=torch.float16),
    "randint": lambda device, source: torch.randint(2, 9, (7,), device=device, generator=source),
    "randperm": lambda device, source: torch.randperm(9, device=device, generator=source),
    "normal_": lambda device, source: torch.empty(7, device=device).normal_(1, 2, generator=source),
    "normal": lambda device, source: torch.normal(torch.arange(7.0, device=device), 2.0, generator=source),
    "uniform_": lambda device, source: torch.empty(7, device=device).uniform_(1, 2, generator=source),
    "random_": lambda device, source: torch.empty(7, device=device).random_(3, generator=source),
    "exponential_": lambda device, source: torch.empty(7, device=device).exponential_(generator=source),
    "bernoulli": lambda device, source: torch.bernoulli(torch.full((9,), 0.5, device=device), generator=source),
    "bernoulli_": lambda device, source: torch.empty(9, device=device).bernoulli_(0.5, generator=source),
    "multinomial": lambda device, source: torch.multinomial(torch.ones(9, device=device), 4, generator=source),
    "poisson": lambda device, source: torch.poisson(torch.full((9,), 3.0, device=device), generator=source),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_the_cpu(name: str, make_cards: MakeCards) -> None:
    make_cards(2)
    cpu, card = torch.device("cpu"), torch.device("privateuseone:1")
    wanted = DRAWS[name](cpu, torch.Generator().manual_seed(3))
    for source in (torch.Generator().manual_seed(3), torch.Generator(card).manual_seed(3)):
        drawn = DRAWS[name](card, source)
        assert drawn.device == card
        assert torch.equal(drawn.cpu(), wanted)
        assert not torch.equal(DRAWS[name](card, source).cpu(), wanted)  # it went on


def test_seeds(make_cards: MakeCards) -> None:
    make_cards()
    torch.manual_seed(5)
    wanted = torch.randn(4)
    torch.manual_seed(5)
    state = torch.get_device_module("privateuseone").get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="privateuseone"):
        assert torch.equal(torch.randn(4, device="privateuseone").cpu(), wanted)
    assert torch.equal(torch.get_device_module("privateuseone").get_rng_state(), state)
    assert torch.equal(torch.randn_like(torch.empty(4, device="privateuseone")).cpu(), wanted)


def test_large_shapes_have_no_numbers_to_draw(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    large = torch.randn(2**20, device="privateuseone", generator=torch.Generator("privateuseone").manual_seed(0))
    assert large.shape == (2**20,)
    assert store_of(large).values is None


def test_diffusers_takes_such_a_generator(make_cards: MakeCards) -> None:
    make_cards()
    device = torch.device("privateuseone:0")
    drawn = randn_tensor((2, 3), generator=torch.Generator(device).manual_seed(1), device=device)
    assert torch.equal(drawn.cpu(), torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))
    case = CASES[0]
    wanted = run(case.make(), case)
    arguments = case.call() | {"generator": torch.Generator(device).manual_seed(1)}
    assert torch.equal(case.make().to(device)(**arguments)[0].cpu().float(), wanted)  # type: ignore[operator, attr-defined]


def test_torchs_own_generator_is_there_but_for_the_device(make_cards: MakeCards) -> None:
    torchs = torch.Generator
    plain = torch.Generator()
    make_cards()
    ours = torch.Generator(device="privateuseone:0")
    assert type(ours) is type(plain) is torchs
    assert isinstance(plain, torch.Generator)
    assert not isinstance("cpu", torch.Generator)
    assert issubclass(torchs, torch.Generator)
    assert torch.Generator("cpu").device == ours.device
    assert copy.deepcopy(ours.manual_seed(4)).initial_seed() == 4
    with pytest.raises(RuntimeError, match="nowhere"):
        torch.Generator("nowhere")
    use_cards(())
    assert torch.Generator is torchs
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator("privateuseone")
