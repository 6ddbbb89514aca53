"""A weight store that the engine has never seen: an entry in each registry and one class are all that it takes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from inspection import assert_same, imprint
from tightfit.apply.fitting import Fitted
from tightfit.apply.weights import store_factory
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.weight_store import WeightStore
from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.device import CpuDevice, Device, LoopbackDevice
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.modules import find_components
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.argument_values import Given
from tightfit.run.call_arguments import request_of_example
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.stores import STORES, StoreKind
from tiny_pipelines import CASES, run


class CompressedStore(WeightStore):
    """Weights compressed in memory; of a pipeline without weights, their shapes."""

    writable = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        plain = HostStore(tensors, CpuDevice())
        self.layouts, self.size = plain.layouts, plain.size
        self._compressed = None if plain.buffer.is_meta else zlib.compress(plain.buffer.numpy().tobytes(), 1)

    def _bytes(self) -> torch.Tensor:
        if self._compressed is None:
            return torch.empty(self.size, dtype=torch.uint8, device="meta")
        return torch.frombuffer(bytearray(zlib.decompress(self._compressed)), dtype=torch.uint8)

    def values(self) -> list[torch.Tensor]:
        region = self._bytes()
        return [layout.view(region) for layout in self.layouts]

    def send(self, stream: CopyStream, target: torch.Tensor, after: Any) -> CopyHandle:
        return stream.send(target, self._bytes(), after)


def compressed_stores(factory: store_factory.StoreFactory, undo: ExitStack) -> store_factory.MakeStore:
    return CompressedStore


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = StoreKind("compressed memory", is_host_memory=False, ram_share=0.9, padding=1024)
    monkeypatch.setitem(STORES, "compressed", kind)  # type: ignore[arg-type] # read-only to the type checker
    monkeypatch.setitem(store_factory.STORE_MAKERS, "compressed", compressed_stores)  # type: ignore[arg-type] # as well


def plan_for(pipe: Any, placement: str, device: str) -> Plan:
    there = ComponentPlan(placement=placement, offload_to="compressed")
    components = {name: there for name, part in find_components(pipe).items() if list(part.parameters())}
    return Plan(device=device, components=components)


@pytest.mark.parametrize("device", [CpuDevice(), LoopbackDevice()], ids=["cpu", "loopback"])
@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_a_third_store(device: Device, placement: str) -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    wanted = run(pipe, case)
    before = imprint(pipe)
    fitted = Fitted(pipe, plan_for(pipe, placement, device.name), device)
    assert all("from compressed memory" in each.described for each in fitted.plan.components.values())
    assert torch.equal(run(pipe, case), wanted)
    assert torch.equal(run(pipe, case), wanted)
    fitted.undo()
    assert_same(before, imprint(pipe))
    assert torch.equal(run(pipe, case), wanted)


@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_its_calls_are_simulated(placement: str) -> None:
    """Without weights, as many bytes are copied to the card as on a device that has them."""
    case = next(case for case in CASES if case.name == "Flux")
    pipe, device = case.make(), LoopbackDevice()
    fitted = Fitted(pipe, plan_for(pipe, placement, device.name), device)
    run(pipe, case)
    copied = [phase.bytes_in for phase in fitted.report().trace.phases]
    fitted.undo()
    request = request_of_example(pipe, case.call())
    with unlimited_card(ANY_CARD) as card:
        simulation = SimulationRun(meta_copy(pipe), card, plan_for(pipe, placement, "simulated:0"), request)
        simulation.run(Given(case.call(), torch.device("cpu")))
        trace = simulation.fitted.report().trace
    assert [phase.bytes_in for phase in trace.phases] == copied
    assert sum(copied) > 0
