"""Maps of an autoencoder in host memory: they come and go beside the arithmetic, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from apply.test_strips import prepared, program_of
from devices.late import LateCard
from simulator.conftest import ACCELERATOR
from tightfit.apply.activations.strips.feature_maps import HostMapBuffer
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.program_inputs import LiveWeights
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.runner import Runner
from tightfit.apply.activations.strips.strip_plan import PlannedStage, find_strip_plan, peak_of_stages
from tightfit.devices.device import Device, LoopbackDevice
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.recorder import Recorder
from tightfit.schema.results import PhaseTrace
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

ROWS = 8
WORKING = 20_000  # bytes: a dozen strips in the longest stage
Ahead = Callable[[int], bool]  # whether copies are ahead of need in a stage
NEVER: Ahead = lambda _: False  # noqa: E731
ALWAYS: Ahead = lambda _: True  # noqa: E731


class Decoding:
    """A tiny decoder's program in strips, its maps in the host memory of `device`."""

    def __init__(self, device: Device) -> None:
        self.device, self.recorder, self.host_pool = device, Recorder(device), ActivationHostPool(device)
        program = program_of(ROWS)
        self.strip_plan = find_strip_plan(program, WORKING, "host")
        case, model = prepared("AutoencoderKL without attention")
        self._weights = LiveWeights(model.to(device.torch_device), program)
        self._latents = case.latents(ROWS, 1).to(device.torch_device)

    def passes(self, ahead: Ahead) -> list[PlannedStage]:
        return [each._replace(ahead=ahead(stage)) for stage, each in enumerate(self.strip_plan.passes)]

    def __call__(self, ahead: Ahead) -> tuple[torch.Tensor, PhaseTrace]:
        strip_plan = self.strip_plan
        runner = Runner(strip_plan.graph, strip_plan.in_host, self.host_pool, self._weights, self.recorder)
        with torch.inference_mode(), self.recorder.call():
            self.recorder.enter("decode")
            (picture,) = runner.run([self._latents], self.passes(ahead))
            return picture, self.recorder.trace().phases[0]


@functools.cache
def usual() -> tuple[torch.Tensor, PhaseTrace]:
    return Decoding(LoopbackDevice())(NEVER)


@pytest.mark.parametrize("ahead", [NEVER, ALWAYS], ids=["never", "always"])
def test_copies_at_the_last_moment_change_nothing(ahead: Ahead) -> None:
    picture, phase = Decoding(LateCard())(ahead)
    wanted, known = usual()
    assert torch.equal(picture, wanted)
    assert (phase.bytes_in, phase.bytes_out) == (known.bytes_in, known.bytes_out)
    assert phase.bytes_in > phase.bytes_out > 0


@pytest.mark.parametrize("ahead", [NEVER, ALWAYS, lambda stage: stage % 3 > 0], ids=["never", "always", "some"])
def test_what_is_under_way_is_counted(ahead: Ahead) -> None:
    decoding, small = Decoding(LoopbackDevice()), 4096  # what has no rows: statistics of a few groups
    counted = peak_of_stages(decoding.strip_plan.graph, decoding.strip_plan.in_host, decoding.passes(ahead)).device
    picture, phase = decoding(ahead)
    assert 0.95 * counted <= phase.peak_bytes <= counted + small
    assert torch.equal(picture, usual()[0])


@pytest.mark.parametrize("after", [3, 40, 200])
def test_an_interruption_leaves_nothing_behind(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, made = Decoding(LateCard()), Runner._made
    left = after

    def interrupted(self: Runner, index: int, span: Span) -> torch.Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return made(self, index, span)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_made", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoding(ALWAYS)
    assert decoding.host_pool.idle
    assert torch.equal(decoding(ALWAYS)[0], usual()[0])
    assert decoding.host_pool.idle


def maps(host_pool: ActivationHostPool, axis: int) -> tuple[HostMapBuffer, torch.Tensor]:
    shape = [2, 3, 5]
    shape.insert(axis, 12)
    node = Node(op="x", args=(), kwargs={}, shape=tuple(shape), dtype=torch.float16, axis=axis)
    return HostMapBuffer(node, host_pool, Recorder(LoopbackDevice())), torch.randn(shape).half()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_any_rows_can_be_taken(axis: int, ahead: bool) -> None:
    kept, whole = maps(ActivationHostPool(LateCard()), axis)
    rows = lambda lo, hi: whole.narrow(axis, lo, hi - lo)  # noqa: E731
    for lo, hi in ((0, 5), (5, 6), (6, 12)):
        kept.put(rows(lo, hi), Span(lo, hi))
        if ahead:
            kept.expect(Span(2, 7))  # not before they are there
        else:
            kept.sent()
    assert torch.equal(kept.take(Span(2, 7)), rows(2, 7))
    kept.forget(7)
    for lo, hi in ((7, 8), (8, 12)):
        if ahead:
            kept.expect(Span(lo, hi))
        found = kept.take(Span(lo, hi))
        assert torch.equal(found, rows(lo, hi))
        assert found.is_contiguous()


LINK = 1e8  # bytes a second


@pytest.fixture
def slow_link() -> Iterator[SimulatedDevice]:
    """A card whose link takes as long each way as its arithmetic, or longer."""
    rates: dict[str, Any] = {"link_rate": LINK, "launch_overhead": 0.0, "arithmetic_rates": {"float32": 1e10}}
    use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update=rates), Host(), "shapes")])
    yield SimulatedDevice()
    use_cards(())


def test_copies_take_their_time_beside_the_arithmetic(slow_link: SimulatedDevice) -> None:
    decoding = Decoding(slow_link)
    (_, at_need), (_, ahead) = decoding(NEVER), decoding(ALWAYS)
    coming, going = ahead.bytes_in / LINK, ahead.bytes_out / LINK
    arithmetic = at_need.seconds - coming - going
    assert 0.3 * coming < arithmetic < coming
    assert ahead.seconds < 1.3 * coming  # what nothing can be faster than
    assert decoding.host_pool.idle
