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
from tightfit.measure.modules import find_components
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.stores import STORES, StoreKind
from tiny_pipelines import CASES, run


class CompressedStore(WeightStore):
    """Weights compressed in memory."""

    writable = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        plain = HostStore(tensors, CpuDevice())
        self.layouts, self.size = plain.layouts, plain.size
        self._compressed = zlib.compress(plain.buffer.numpy().tobytes(), 1)

    def _bytes(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(self._compressed)), dtype=torch.uint8)

    def values(self) -> list[torch.Tensor]:
        region = self._bytes()
        return [layout.view(region) for layout in self.layouts]

    def send(self, stream: CopyStream, target: torch.Tensor, after: Any) -> CopyHandle:
        return stream.send(target, self._bytes(), after)


def compressed_stores(factory: store_factory.StoreFactory, undo: ExitStack) -> store_factory.MakeStore:
    return CompressedStore


@pytest.mark.parametrize("device", [CpuDevice(), LoopbackDevice()], ids=["cpu", "loopback"])
@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_a_third_store(monkeypatch: pytest.MonkeyPatch, device: Device, placement: str) -> None:
    kind = StoreKind("compressed memory", is_host_memory=False, ram_share=0.9, padding=1024)
    monkeypatch.setitem(STORES, "compressed", kind)  # type: ignore[arg-type] # read-only to the type checker
    monkeypatch.setitem(store_factory.STORE_MAKERS, "compressed", compressed_stores)  # type: ignore[arg-type] # as well
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    wanted = run(pipe, case)
    before = imprint(pipe)
    streamed = ComponentPlan(placement=placement).model_copy(update={"offload_to": "compressed"})
    components = {name: streamed for name, part in find_components(pipe).items() if list(part.parameters())}
    fitted = Fitted(pipe, Plan(device=device.name, components=components), device)
    assert all("from compressed memory" in each.described for each in fitted.plan.components.values())
    assert torch.equal(run(pipe, case), wanted)
    assert torch.equal(run(pipe, case), wanted)
    fitted.undo()
    assert_same(before, imprint(pipe))
    assert torch.equal(run(pipe, case), wanted)
