"""Out of memory inside strips: the same numbers from smaller ones, and the report says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from simulator.conftest import ACCELERATOR
from tightfit import fit
from tightfit.apply.activations.strips import executor as method
from tightfit.apply.activations.strips.executor import StripConfig
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.program_inputs import rewinder
from tightfit.measure.meter import TensorMeter
from tightfit.schema.footprint import FeatureMaps
from tightfit.simulator.backend import use_cards
from tightfit.simulator.blocks import Block
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tightfit.units import format_bytes

ROUNDING = 1e-5  # of the largest value, float32
ONE_STRIP = 2**17  # bytes for strips
SMALL = 4096  # bytes of what has no rows: statistics


class Decoder(nn.Module):
    """Some layers, with maps that wait (a norm needs all rows), as an autoencoder."""

    def __init__(self, *, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Conv2d(4, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.Conv2d(8, 1, 3, padding=1)
        self.noisy = noisy

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        if self.noisy:
            x = x + torch.randn(x.shape, device=x.device)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.out(x)  # type: ignore[no-any-return]


def latents(rows: int = 32) -> torch.Tensor:
    return torch.randn(1, 4, rows, 16, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decoded(module: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return module.decode(x).cpu()  # type: ignore[no-any-return]


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) <= ROUNDING * float(wanted.abs().max())


@dataclass
class Fitted:
    """A decoder in strips that was called once, which took one strip."""

    module: Decoder
    handle: Any
    x: torch.Tensor
    wanted: torch.Tensor
    program: Program
    tries: list[Program]  # one for each time that strips are begun

    def peak(self, working: int, maps: FeatureMaps = "device") -> int:
        return StripConfig(self.program, working, maps).strip_plan.peak.device

    def decode(self) -> None:
        """As it should be, in as many tries as it takes."""
        self.tries.clear()
        assert_near(decoded(self.module, self.x), self.wanted)

    def notes(self) -> list[str]:
        return [note for note in self.handle.report().trace.notes if "counted" not in note]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fitted]]:
    handles, tries = [], []

    class Told(method.Runner):
        def __init__(self, graph: Any, *args: Any, **kwargs: Any) -> None:
            tries.append(graph.program)
            super().__init__(graph, *args, **kwargs)

    monkeypatch.setattr(method, "Runner", Told)

    def make(*, noisy: bool = False, device: str = "loopback") -> Fitted:
        module = Decoder(noisy=noisy).eval()
        wanted = decoded(module, latents())
        handle = fit(module, plan={"vae": {"strips": ONE_STRIP}}, device=device, count_activations=False)
        handles.append(handle)
        x = latents().to(handle.recorder.device.torch_device)
        assert_near(decoded(module, x), wanted)
        return Fitted(module, handle, x, wanted, tries[0], tries)

    yield make
    for handle in handles:
        handle.undo()


class Memory(TensorMeter):
    """Of what is made inside, no more than `limit` bytes may be alive at a time, on the CPU."""

    def __init__(self, limit: int = 2**40) -> None:
        super().__init__(self._changed_by)
        self.limit, self.live, self.most = limit, 0, 0

    def _changed_by(self, difference: int) -> None:
        self.live += difference
        self.most = max(self.most, self.live)
        if difference > 0 and self.live > self.limit:
            raise torch.OutOfMemoryError(f"{self.live} bytes of {self.limit}")


def too_little_for(case: Fitted) -> Memory:
    """A byte less than it takes."""
    with Memory() as memory:
        case.decode()
    return Memory(memory.most - 1)


@pytest.mark.parametrize("noisy", [False, True])
def test_strips_are_halved_until_they_fit(fitted: Callable[..., Fitted], noisy: bool) -> None:
    case = fitted(noisy=noisy)
    limit = case.peak(1) + SMALL
    for several in (True, False):  # what was found is remembered
        with Memory(limit):
            case.decode()
        assert (len(case.tries) > 2) == several
        (note,) = case.notes()
        said = rf"decode: strips within (.*) instead of {format_bytes(ONE_STRIP)}, because the device ran out of memory"
        assert re.fullmatch(said, note), note


def test_one_halving_where_that_does(fitted: Callable[..., Fitted]) -> None:
    case = fitted()
    with too_little_for(case):
        case.decode()
    assert len(case.tries) == 2
    decoded(case.module, latents(16))
    assert case.notes() == []  # another kind of call


def test_where_nothing_helps_the_error_is_torchs(fitted: Callable[..., Fitted]) -> None:
    case = fitted(device="cpu")
    with Memory(1000), pytest.raises(torch.OutOfMemoryError, match="of 1000"):
        case.decode()
    assert 2 < len(case.tries) < 12
    smallest = StripConfig(case.program, 1, "host")
    assert smallest.narrower(smallest, separate=True) is None
    case.decode()  # as it was planned
    assert len(case.tries) == 1
    assert case.notes() == []


def test_what_somebody_else_handles_meanwhile_stays_as_it_was(fitted: Callable[..., Fitted]) -> None:
    case, frames = fitted(), []
    try:
        raise KeyError("theirs")
    except KeyError as theirs:
        with too_little_for(case):
            case.decode()
        frames.append(theirs.__traceback__)
    assert frames != [None]


def test_noise_that_cannot_be_drawn_again_is_not(
    fitted: Callable[..., Fitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = fitted(noisy=True)
    unknown: Any = SimpleNamespace(kind="other", torch_device=torch.device("xla", 0))
    assert rewinder(case.program, unknown) is None
    monkeypatch.setattr(method, "rewinder", lambda program, device: rewinder(program, unknown))
    little = too_little_for(case)
    with little, pytest.raises(torch.OutOfMemoryError):
        case.decode()
    assert len(case.tries) == 1


# a card


@pytest.fixture
def limit_card() -> Iterator[Callable[[int], None]]:
    """On a simulated card with real values, allows so many bytes beside what is there."""
    card = SimulatedCard(0, ACCELERATOR, Host(), "real")
    use_cards([card])
    malloc, limit = card.malloc, 2**40

    def refusing(size: int) -> Block:
        if card.live.now + size > limit:
            raise torch.OutOfMemoryError(f"{size} bytes more than {card.live.now} of {limit}")
        return malloc(size)

    def allow(size: int) -> None:
        nonlocal limit
        limit = card.live.now + size

    card.malloc = refusing  # type: ignore[method-assign]
    yield allow
    use_cards(())


def test_maps_leave_a_card_where_strips_alone_do_not_do(
    limit_card: Callable[[int], None], fitted: Callable[..., Fitted]
) -> None:
    case = fitted(device="simulated:0")
    smallest, in_host = case.peak(1), case.peak(1, "host")
    assert in_host < smallest / 2
    limit_card((smallest + in_host) // 2)
    for several in (True, False):
        case.decode()
        assert (len(case.tries) > 2) == several
        (note,) = case.notes()
        assert note.startswith("decode: maps in host memory, strips within ")
        assert note.endswith("because the device ran out of memory")
        assert case.handle.report().trace.phases[0].bytes_out > 0
    limit_card(2**40)
