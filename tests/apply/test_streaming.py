"""Weights at every home, through every ring, with everything possible staying: the untouched pipeline's bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from a_few import a_few
from inspection import assert_same, imprint
from late_device import LateDevice
from more_pipelines import MORE_CASES
from tightfit import fit
from tightfit.apply.weights import store_factory
from tightfit.apply.weights.quantized_tensor import Float8Weight, storable
from tightfit.devices.copy_stream import LateCopyStream
from tightfit.devices.disk import DiskReader
from tightfit.measure.modules import find_components, find_role, inspect_component
from tightfit.plan.layer_selection import group_layers
from tightfit.schema.stores import STORES
from tiny_pipelines import CASES, TinyCase, run

QUICK = (
    "StableDiffusion", "StableDiffusionControlNet", "StableDiffusionInpaint", "StableDiffusion3", "FluxImg2Img", "Wan",
    "LTXImageToVideo", "CogVideoX",
)  # fmt: skip


@functools.lru_cache(maxsize=4)
def prepared(name: str) -> tuple[TinyCase, Any, torch.Tensor]:
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe = case.make()
    return case, pipe, run(pipe, case)


def draw_component(draw: Any, name: str, part: nn.Module) -> dict[str, Any]:
    """A legal plan for a component, anything that there can be."""
    chosen: dict[str, Any] = {"offload_to": draw(st.sampled_from(list(STORES)))}
    if draw(st.booleans()):
        return chosen | {"placement": "offload"}
    component = inspect_component(name, part)
    granularity = draw(st.sampled_from(["layer", "block"]))
    own = {layer.name: layer.bytes + 4 * 4096 for layer in component.layers}
    groups = group_layers(component, granularity)
    sizes = {group: -(-sum(own[layer] for layer in layers) // 4096) * 4096 for group, layers in groups.items()}
    resident = draw(st.sets(st.sampled_from(sorted(sizes))))
    passing = [size for group, size in sizes.items() if group not in resident]
    ring = draw(st.integers(max(passing, default=0), max(sum(passing), 4096)))
    return chosen | {
        "placement": "stream",
        "granularity": granularity,
        "resident_layers": tuple(sorted(resident)),
        "ring_buffer": ring,
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", a_few([case.name for case in (*CASES, *MORE_CASES)], *QUICK))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_any_home_ring_and_residency_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    case, pipe, untouched = prepared(name)
    before = imprint(pipe)
    device = data.draw(st.sampled_from(["cpu", "loopback", "late"]), label="device")
    plan = {n: draw_component(data.draw, n, part) for n, part in find_components(pipe).items()}
    fitted = fit(pipe, plan={"components": plan}, device=LateDevice() if device == "late" else device)
    try:
        first, second = run(pipe, case), run(pipe, case)
    finally:
        fitted.undo()
    assert torch.equal(first, untouched)
    assert torch.equal(second, untouched)
    assert sum(phase.bytes_out for phase in fitted.report().trace.phases) == 0
    assert fitted.live().weights == 0
    assert_same(before, imprint(pipe))


def widened_once(network: nn.Module, form: torch.dtype) -> None:
    """The straightforward way: each weight is cast to eight bits and widened again, and stays like that."""
    for owner, name, weight in list(storable(network, None)):
        owner._parameters[name] = nn.Parameter(Float8Weight.store(weight, form).widen(), weight.requires_grad)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_stored_in_eight_bits_is_as_casting_each_weight(name: str, store: str) -> None:
    case = next(case for case in CASES if case.name == name)
    plain, pipe = case.make(), case.make()
    denoiser = next(n for n, part in find_components(pipe).items() if find_role(n, part) == "denoiser")
    widened_once(getattr(plain, denoiser), torch.float8_e4m3fn)
    wanted = run(plain, case)
    chosen = {"placement": "stream", "storage": "float8_e4m3fn", "offload_to": store}
    for device in ("loopback",) if STORES[store].is_host_memory else ("cpu", "loopback"):
        fitted = fit(pipe, plan={"components": {denoiser: chosen}}, device=device)
        assert torch.equal(run(pipe, case), wanted)
        fitted.undo()


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux", "LTX"])
def test_an_order_that_is_known_is_never_late(name: str) -> None:
    case, pipe, _ = prepared(name)
    fitted = fit(pipe, level=3, device="loopback")
    run(pipe, case)
    run(pipe, case)
    trace = fitted.report().trace
    fitted.undo()
    assert [phase.on_demand for phase in trace.phases] == [0] * len(trace.phases)
    assert trace.notes == ()


def test_a_processor_reads_past_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[DiskReader] = []
    monkeypatch.setattr(store_factory, "DiskReader", lambda: readers.append(DiskReader()) or readers[-1])
    case, pipe, untouched = prepared("Flux")
    fitted = fit(
        pipe, plan={"components": {"transformer": {"placement": "stream", "offload_to": "disk"}}}, device="cpu"
    )
    assert torch.equal(run(pipe, case), untouched)
    (reader,) = readers
    if not reader.notes:  # else the file system refuses direct reads
        assert reader.direct_bytes == reader.bytes_read > 0
    fitted.undo()


def test_each_pass_follows_the_one_before_whatever_stream_it_is_on() -> None:
    told: list[str] = []

    class Telling(LateCopyStream):
        def follow_host(self) -> None:
            told.append("follow")

        def mark(self) -> None:
            told.append("mark")

    class Card(LateDevice):
        def copy_stream(self) -> LateCopyStream:
            return Telling()

    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    model.to(torch.float32)
    plan = {"placement": "stream", "resident_layers": ["0"], "ring_buffer": 2 * (2**20 + 4096)}
    fit(model, plan={"components": {"model": plan}}, device=Card())
    for _ in range(3):
        told.clear()
        model(torch.zeros(1, 512))
        assert told[0] == "follow"
        assert told[-1] == "mark"
