"""Weights that travel to a real card: from every home, through rings and staging, and while others finish."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from inspection import assert_same, imprint
from replaced_weights import PLACEMENTS, check_renewed
from tightfit import fit
from tightfit.apply.weights import pinned_staging as staging
from tightfit.apply.weights.weight_store import plain_parts
from tightfit.devices.cuda import CudaDevice
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.modules import find_components, weight_bytes
from tightfit.schema.stores import STORES
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

HOMES: dict[str, dict[str, Any]] = {
    "pinned": {"offload_to": "cpu", "pinned": True},
    "plain": {"offload_to": "cpu", "pinned": False},
    **{name: {"offload_to": name} for name, kind in STORES.items() if not kind.is_host_memory},
}


@pytest.mark.parametrize("placement", ["offload", "stream"])
@pytest.mark.parametrize("store", HOMES)
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_every_home_gives_the_bits_of_a_resident_model(
    name: str, store: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 64 * 1024)
    monkeypatch.setattr(staging, "SIZE", 64 * 1024)
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    run(pipe, case)  # transformers installs hooks of its own at the first call
    before = imprint(pipe)
    fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    plan = {part: HOMES[store] | {"placement": placement} for part in find_components(pipe)}
    fitted = fit(pipe, plan={"components": plan}, device="cuda")
    peaks = []
    for _ in range(4):  # from the second on, the next comes while the one before finishes
        assert torch.equal(run(pipe, case).cpu(), wanted)
        peaks.append(fitted.report().trace.peak_bytes)
    assert max(peaks[1:]) <= 1.02 * peaks[0]
    assert fitted.live().weights == 0
    fitted.undo()
    assert_same(before, imprint(pipe))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_network_renews_goes_home(placement: str) -> None:
    with torch.no_grad():
        check_renewed(placement, "cuda", torch.rand(2, 64).cuda())


def test_compiled_blocks_on_the_card() -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe: Any = case.make()
    pipe.transformer.compile_repeated_blocks(backend="aot_eager")
    fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted = fit(pipe, level=3, device="cuda")
    for _ in range(2):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    fitted.undo()


@pytest.mark.filterwarnings("ignore:.*upcast_vae")
@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_masters_that_are_cast_in_each_call_stay_page_locked(placement: str) -> None:
    case = next(case for case in CASES if case.name == "StableDiffusionXL")
    pipe = case.make().to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    fit(pipe, level=0, device="cuda")
    wanted = [run(pipe, case).cpu() for _ in range(2)]
    chosen = {"offload_to": "cpu", "pinned": True, "placement": placement}
    fitted = fit(pipe, plan={"components": {"vae": chosen, "unet": chosen}}, device="cuda")
    groups, pinned = fitted._now.places.of("vae")._streamers["vae"]._groups, []
    look = pipe.vae.decoder.register_forward_hook(
        lambda *_: pinned.extend(master.is_pinned() for group in groups for master in group.source_params)
    )
    for each in wanted:
        assert torch.equal(run(pipe, case).cpu(), each)
    look.remove()
    assert len(pinned) == 2 * sum(len(group.source_params) for group in groups)
    assert all(pinned)
    fitted.undo()
    assert not any(weight.is_pinned() for part in (pipe.vae, pipe.unet) for weight in part.parameters())


def layers(count: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Module()
    network.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
    return network.to(torch.bfloat16).requires_grad_(False)


def inside(model: nn.Module) -> list[tuple[type, torch.device, list[tuple[torch.device, torch.Tensor]]]]:
    """Of each weight its class, where it is, and where what it consists of is, with the values."""
    return [
        (type(weight), weight.device, [(part.device, part.detach().cpu().clone()) for part in plain_parts(weight)])
        for weight in model.parameters()
    ]


def assert_same_inside(model: nn.Module, before: list[Any]) -> None:
    for (kind, device, parts), (kind_before, device_before, parts_before) in zip(inside(model), before, strict=True):
        assert (kind, device) == (kind_before, device_before)
        assert [place for place, _ in parts] == [place for place, _ in parts_before]
        assert all(torch.equal(now, then) for (_, now), (_, then) in zip(parts, parts_before, strict=True))


@pytest.mark.parametrize("begins", ["cpu", "cuda"])
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "int8"])
def test_storing_in_eight_bits_needs_the_stored_form_and_one_weight(storage: str, begins: str) -> None:
    if storage == "int8":
        pytest.importorskip("torchao")
    model = layers(16, 1024).to(begins)
    before, device = inside(model), torch.device("cuda", 0)
    loaded, one = weight_bytes(model), model.blocks[0].weight.nbytes
    gc.collect()  # what earlier tests left on the card
    at_first = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    plan = {"components": {"model": {"placement": "resident", "storage": storage, "skip_patterns": []}}}
    fitted = fit(model, plan=plan, device="cuda")
    stored = weight_bytes(model)
    assert stored < 0.52 * loaded
    most = torch.cuda.max_memory_allocated(device) - at_first
    assert most <= (stored + one if begins == "cpu" else 0)
    held = torch.cuda.memory_allocated(device) - at_first - (stored if begins == "cpu" else stored - loaded)
    assert 0 <= held <= 16 * 4 * 512  # allocators round
    parts = [part for weight in model.parameters() for part in plain_parts(weight)]
    assert {part.device for part in parts} == {device}
    fitted.undo()
    assert_same_inside(model, before)


def test_what_is_written_into_stored_weights_is_kept() -> None:
    model = layers(2, 64)
    plan = {"components": {"model": {"placement": "resident", "storage": "float8_e4m3fn", "skip_patterns": []}}}
    fitted = fit(model, plan=plan, device="cuda")
    model.blocks[1].weight.data.fill_(0.5)
    fitted.undo()
    assert model.blocks[1].weight.device.type == "cpu"
    assert model.blocks[1].weight.eq(0.5).all()


@pytest.mark.parametrize("begins", ["cpu", "cuda"])
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
def test_weights_that_were_quantised_before_are_moved_with_all_that_they_consist_of(
    placement: str, begins: str
) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = layers(3, 256)
    plain = nn.Sequential(*model.blocks)
    quantization.quantize_(plain, quantization.Int8WeightOnlyConfig(version=2))
    model.to(begins)
    x = torch.randn(2, 256, dtype=torch.bfloat16, device="cuda")
    before = inside(model)
    model.forward = plain.forward
    wanted = copy.deepcopy(plain).to("cuda")(x).cpu()
    fitted = fit(model, plan={"components": {"model": {"placement": placement}}}, device="cuda")
    assert torch.equal(model(x).cpu(), wanted)
    if placement == "resident":
        parts = [part for weight in model.parameters() for part in plain_parts(weight)]
        assert {part.device for part in parts} == {x.device}
    fitted.undo()
    assert_same_inside(model, before)


def test_what_another_stream_is_given_next_begins_after_the_last_mark() -> None:
    stream = CudaDevice().copy_stream()
    number = torch.zeros(1, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(500_000_000)
        number.fill_(1)
        stream.mark()
    with torch.cuda.stream(second):
        stream.follow_host()
        copy = number.clone()
    torch.cuda.synchronize()
    assert copy.item() == 1


def test_a_stream_waits_for_what_stays_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes the host time in each pass; another stream waits by itself."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), torch.randn(2, 512)
    waits = list[torch.cuda.Stream]()
    wait = torch.cuda.Stream.wait_event

    def counted(self: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        waits.append(self)
        wait(self, event)

    with torch.no_grad():
        fitted = fit(model, plan={"components": {"model": {"placement": "offload"}}}, device="cuda")
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", counted)
        x = x.to("cuda")
        wanted = model(x)
        assert waits.count(torch.cuda.current_stream()) == 6
        waits.clear()
        assert torch.equal(model(x), wanted)
        assert not waits
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            assert torch.equal(model(x), wanted)
        assert waits == 7 * [other]  # and for the pass before
        fitted.undo()
