"""int8 storage: torchao's own numbers at every place, the way back, and what is said where torchao is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_anything import LORA_STEPS
from test_weights import INPUT, Tower
from torch import nn

from inspection import assert_same, imprint, relative_error
from tightfit import PlanError, apply_plan, fit
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.quantize import store_weights
from tightfit.apply.weights.quantized_tensor import storable
from tightfit.apply.weights.weight_store import plain_parts
from tightfit.measure.modules import find_components, find_layers, find_role, inspect_component, weight_bytes
from tightfit.plan.layer_selection import AHEAD, resolve_streaming
from tightfit.schema.plan import ComponentPlan, Plan
from tiny_pipelines import CASES, run

pytest.importorskip("torchao")

from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, PerRow, quantize_

from tightfit.apply.weights.int8 import Int8Weight

every_place = pytest.mark.parametrize(
    ("placement", "store", "device"),
    [(p, h, d) for p in ("resident", "offload", "stream") for h in ("cpu", "disk") for d in ("cpu", "loopback")],
)


def stored(**chosen: Any) -> dict[str, Any]:
    return {"components": {"model": {"storage": "int8"} | chosen}}


def by_torchao(module: nn.Module) -> None:
    """The straightforward way: torchao's own function, for the layers that are stored by default."""
    chosen = {id(owner) for owner, _, _ in storable(module, None, nn.Linear)}
    config = Int8WeightOnlyConfig(version=2, set_inductor_config=False)
    quantize_(module, config, filter_fn=lambda part, _: id(part) in chosen)


def dequantised(module: nn.Module) -> None:
    """The other: each matrix is stored and widened once, and stays like that."""
    for owner, name, weight in list(storable(module, None, nn.Linear)):
        value = Int8Tensor.from_hp(weight.detach(), PerRow()).dequantize()
        owner._parameters[name] = nn.Parameter(value, weight.requires_grad)


# numbers


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everywhere_torchaos_bits(dtype: torch.dtype, placement: str, store: str, device: str) -> None:
    model, plain, x = Tower(width=64).to(dtype), Tower(width=64).to(dtype), INPUT.to(dtype)
    untouched, before = model(x), imprint(model)
    by_torchao(plain)
    fitted = fit(model, plan=stored(placement=placement, offload_to=store), device=device)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))
    assert fitted.plan.lossy == fitted.report().trace.lossy == ("int8: model is stored in int8",)
    fitted.undo()
    assert_same(before, imprint(model))
    assert torch.equal(model(x), untouched)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("store", "device"), [("cpu", "loopback"), ("disk", "cpu"), ("disk", "loopback")])
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_pipelines_draw_what_torchao_draws(name: str, store: str, device: str) -> None:
    case = next(case for case in CASES if case.name == name)
    plain, wide, pipe = case.make(), case.make(), case.make()
    denoiser = next(n for n, part in find_components(pipe).items() if find_role(n, part) == "denoiser")
    by_torchao(getattr(plain, denoiser))
    dequantised(getattr(wide, denoiser))
    wanted, untouched = run(plain, case), run(pipe, case)
    before = imprint(pipe)
    chosen = {"placement": "stream", "storage": "int8", "offload_to": store}
    fitted = fit(pipe, plan={"components": {denoiser: chosen}}, device=device)
    assert torch.equal(run(pipe, case), wanted)
    assert torch.equal(run(pipe, case), wanted)
    # torchao multiplies the sums by the scales, not the weights: float32 rounds in other places
    assert relative_error(wanted, run(wide, case)) < 1e-4
    assert 0 < relative_error(wanted, untouched) < 0.1
    fitted.undo()
    assert_same(before, imprint(pipe))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 0.0)])
def test_linear_layers_are_as_with_dequantised_weights(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 512).to(dtype), torch.randn(96).to(dtype), 100 * torch.randn(3, 512).to(dtype)
    held = Int8Weight.store(weight)
    wanted = F.linear(x, held.widen(), bias)
    assert wanted.isfinite().all()
    assert relative_error(F.linear(x, held, bias=bias), wanted) <= most
    assert relative_error(held.widen(), weight) < 1 / 127


def test_float16_does_not_overflow_where_torchao_alone_would() -> None:
    torch.manual_seed(0)
    weight, x = (0.05 * torch.randn(64, 512)).half(), (100 * torch.randn(4, 512)).half()
    held = Int8Weight.store(weight)
    assert F.linear(x, held.held).isinf().any()
    assert torch.equal(F.linear(x, held), F.linear(x, held.widen()))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_is_as_with_dequantised_weights(narrow: torch.dtype) -> None:
    held, x = Int8Weight.store(torch.randn(16, 32)), torch.randn(4, 32)
    with torch.autocast("cpu", narrow):
        found, wanted = F.linear(x, held), F.linear(x, held.widen())
    assert found.dtype == narrow
    assert torch.equal(found, wanted)


def test_a_compute_dtype_of_its_own() -> None:
    model, untouched = Tower(), Tower()(INPUT)
    before = imprint(model)
    fitted = fit(model, plan=stored(compute_dtype="bfloat16"), device="cpu")
    assert {tensor.dtype for tensor in [*model.parameters(), *model.buffers()]} == {torch.bfloat16}
    output = model(INPUT)
    assert output.dtype == torch.float32
    assert relative_error(output, untouched) < 0.05
    fitted.undo()
    assert_same(before, imprint(model))


# tensors


def test_stored_weights_pass_for_what_they_stand_for() -> None:
    weight = nn.Parameter(Int8Weight.store(torch.randn(16, 32, dtype=torch.bfloat16)))
    assert (weight.dtype, weight.shape) == (torch.bfloat16, (16, 32))
    assert weight.nbytes == 16 * 32 + 16 * (4 + 1)  # values, float32 scales, zero points
    assert {part.dtype for part in plain_parts(weight)} == {torch.int8, torch.float32}
    assert isinstance(weight.clone(), Int8Weight)
    assert isinstance(weight.to("cpu", torch.bfloat16), Int8Weight)
    assert type(weight.to(torch.float32)) is torch.Tensor
    assert torch.equal(torch.cat([weight, weight])[:16], weight.widen())
    assert not Int8Weight.store(torch.zeros(4, 4)).widen().any()


def test_writing_is_kept_and_known_and_copies_are_exact() -> None:
    weight = nn.Parameter(Int8Weight.store(torch.randn(8, 8)), requires_grad=False)
    assert not weight.written
    weight.data += 1
    assert weight.written
    other = Int8Weight.store(torch.randn(8, 8))
    weight.data.copy_(other)
    assert all(map(torch.equal, plain_parts(weight), plain_parts(other)))


# which weights


def linear_layers(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if isinstance(value.data, Int8Weight)}


def test_only_matrices_of_linear_layers_are_stored() -> None:
    model = Tower()
    fit(model, plan=stored(), device="cpu")
    blocks = {f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down")}
    assert linear_layers(model) - {"tied.weight"} == blocks | {"out.weight"}
    assert type(model.kernel.weight) is type(model.embed_in.weight) is nn.Parameter
    assert model.out.weight is model.tied.weight


def test_what_the_skip_patterns_name_stays_as_loaded() -> None:
    model, plain = Tower(), Tower()
    fit(model, plan=stored(skip_patterns=["down", "out", "tied"]), device="cpu")
    assert linear_layers(model) == {"embed_in.weight", *(f"blocks.{i}.up.weight" for i in range(3))}
    fit(model, plan=stored(skip_patterns=[""]), device="cpu")
    assert torch.equal(model(INPUT), plain(INPUT))


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_what_is_also_used_as_loaded_stays_as_loaded(storage: str) -> None:
    model = nn.Sequential()
    model.embedding, model.head, model.other = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(4, 4)
    model.head.weight = model.embedding.weight
    fit(model, plan={"components": {"model": {"storage": storage, "skip_patterns": ["embedding"]}}}, device="cpu")
    assert type(model.head.weight) is nn.Parameter
    assert model.head.weight is model.embedding.weight
    assert type(model.other.weight) is not nn.Parameter
    assert model.embedding(torch.tensor([1])).shape == (1, 4)


# bytes


def test_a_quarter_crosses_the_link_and_the_planner_knows() -> None:
    model = Tower(width=512)
    loaded, component = weight_bytes(model), inspect_component("model", model)
    planned = resolve_streaming(component, ComponentPlan(placement="stream", storage="int8"))
    fitted = fit(model, plan=stored(placement="stream"), device="loopback")
    assert fitted.plan.components["model"].ring_buffer == planned.ring_buffer
    assert weight_bytes(model) < 0.26 * loaded
    largest = max(sum(p.nbytes for part in parts for p in part.parameters()) for parts in find_layers(model).values())
    assert largest <= (planned.ring_buffer or 0) / AHEAD < largest + 2 * 4096
    fitted = fit(model, plan=stored(placement="offload"), device="loopback")
    model(torch.randn(5, 8))
    assert sum(phase.bytes_in for phase in fitted.report().trace.phases) < 0.27 * loaded


def test_the_planner_knows_that_kernels_stay() -> None:
    component = inspect_component("model", nn.Sequential(nn.Conv2d(64, 64, 3), nn.Linear(256, 256), nn.Flatten()))
    assert [layer.matrices for layer in component.layers] == [{}, {"float32": 256 * 256 * 4}]
    plans = [
        ComponentPlan(placement="stream", storage=storage, resident_layers=())
        for storage in ("as-loaded", "int8", "float8_e5m2")
    ]
    kernel, matrix = 64 * 64 * 9 * 4, 256 * 256 * 4
    rings = [resolve_streaming(component, plan).ring_buffer or 0 for plan in plans]
    wanted = [kernel + matrix, kernel + matrix / 4, (kernel + matrix) / 4]
    assert all(want < ring < want + 4 * 4096 for ring, want in zip(rings, wanted, strict=True))


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_what_is_stored_is_cut_up_as_before(storage: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16384, 16384), nn.Linear(600, 600))  # 1 GiB; 1.4 MB, less than a thousandth
    before = list(find_layers(model))
    restore = store_weights(model, ComponentPlan(storage=storage), FileBackedWeights(), originals_in_ram=True)
    assert list(find_layers(model)) == before == ["0", "1"]
    restore()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


# what others write


@every_place
def test_what_was_written_meanwhile_stays(placement: str, store: str, device: str) -> None:
    model = Tower(width=64)
    weight = model.blocks[1].up.weight
    wanted, others = 3 * weight.detach(), model.blocks[0].up.weight.detach().clone()
    fitted = fit(model, plan=stored(placement=placement, offload_to=store), device=device)
    first = model(INPUT)
    with torch.no_grad():
        model.blocks[1].up.weight.data *= 3
    second = model(INPUT)
    assert relative_error(second, first) > 0.05
    assert torch.equal(model(INPUT), second)
    fitted.undo()
    assert type(model.blocks[1].up.weight) is nn.Parameter
    assert relative_error(model.blocks[1].up.weight, wanted) < 2 / 127
    assert torch.equal(model.blocks[0].up.weight, others)


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_a_lora_loaded_and_fused(placement: str, store: str) -> None:
    case = next(case for case in CASES if case.name == "StableDiffusion")
    plain, pipe = case.make(), case.make()
    chosen = {"storage": "int8", "placement": placement, "offload_to": store}
    fitted = fit(pipe, plan={"components": {"unet": chosen}}, device="loopback")
    untouched = run(pipe, case)
    for step in ("loaded", "fused"):
        for each in (plain, pipe):
            LORA_STEPS[step](each)
        picture = run(pipe, case)
        assert relative_error(picture, run(plain, case)) < 0.02
        assert relative_error(picture, untouched) > 0.1
    fitted.undo()
    assert relative_error(run(pipe, case), run(plain, case)) < 0.02


# where torchao is missing


@pytest.fixture
def no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.delitem(sys.modules, "tightfit.apply.weights.int8")


def test_without_torchao_nothing_is_changed(no_torchao: None) -> None:
    model = Tower()
    before = fit(model, level=0, device="cpu")
    for attempt in (lambda: fit(model, plan=stored(), device="cpu"), lambda: apply_plan(model, Plan(**stored()))):
        with pytest.raises(PlanError, match=r"model: storage=int8 needs torchao .*pip install 'tightfit\[int8\]'"):
            attempt()
        assert before.fitted
    before.undo()
    fit(model, plan={"components": {"model": {"storage": "float8_e4m3fn"}}}, device="cpu")
