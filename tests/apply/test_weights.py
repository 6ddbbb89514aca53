"""fp8 storage and cargo: bytes, forms, and the way back."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from inspection import assert_same, imprint, relative_error
from tightfit import fit
from tightfit.apply.weights.disk_store import SpillFile
from tightfit.apply.weights.quantized_tensor import Float8Weight, StoredWeight, storable
from tightfit.apply.weights.tensor_loader import TensorLoader
from tightfit.devices.device import CpuDevice, LoopbackDevice
from tightfit.measure.modules import find_blocks, find_parts, weight_bytes
from tightfit.measure.recorder import Recorder
from tiny_pipelines import CASES


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """A transformer's skeleton: a tied table, blocks, a convolution, a buffer."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_in = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.out.weight
        self.kernel = nn.Conv2d(1, 4, 3)
        self.register_buffer("shift", torch.randn(width))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed_in(x)
        for block in self.blocks:
            x = block(x)
        flat = self.tied(self.out(x)) + self.shift
        return flat + self.kernel(flat[None, None, :, :].squeeze(1)[:, None].reshape(1, 1, -1, flat.shape[-1])).mean()


INPUT = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_keep_the_precision_of_their_format(form: torch.dtype, dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 48) * torch.logspace(-6, 3, 64)[:, None]).to(dtype)
    stored = Float8Weight.store(weight, form)
    assert stored.dtype == dtype
    assert stored.shape == weight.shape
    largest = weight.float().abs().amax(1, keepdim=True)
    step = torch.finfo(form).eps / 2  # relative rounding of the widest numbers
    assert ((stored.widen().float() - weight.float()).abs() <= largest * (step + 1e-2 * step) + 1e-9).all()


def test_stored_weights_are_zero_where_the_row_is_zero() -> None:
    assert not Float8Weight.store(torch.zeros(4, 4), torch.float8_e4m3fn).widen().any()


def test_stored_weights_pass_for_what_they_stand_for() -> None:
    weight = nn.Parameter(Float8Weight.store(torch.randn(16, 16, dtype=torch.bfloat16), torch.float8_e4m3fn))
    assert weight.dtype == torch.bfloat16
    assert weight.nbytes == 16 * 16 + 16 * 4
    assert isinstance(weight.clone(), Float8Weight)
    assert isinstance(weight.to("cpu", torch.bfloat16), Float8Weight)
    wide = weight.to(torch.float32)
    assert type(wide) is torch.Tensor
    assert torch.equal(torch.cat([weight, weight])[:16], weight.widen())


def test_writing_into_a_stored_weight_is_kept_and_known() -> None:
    weight = nn.Parameter(Float8Weight.store(torch.ones(4, 4), torch.float8_e4m3fn), requires_grad=False)
    assert not weight.written
    weight.data += 1
    assert weight.written
    assert torch.equal(weight.widen(), torch.full((4, 4), 2.0))


def test_norms_embeddings_and_vectors_stay_as_loaded() -> None:
    names = {name for _, name, _ in storable(Tower(), None)}
    owners = {type(owner) for owner, _, _ in storable(Tower(), None)}
    assert names == {"weight"}
    assert owners == {nn.Linear, nn.Conv2d}
    stored = {id(parameter) for _, _, parameter in storable(Tower(), ("blocks", "embed"))}
    assert len(stored) == 2  # the tied matrix once, the kernel


@pytest.mark.parametrize("device", ["cpu", "loopback"])
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_storage_and_the_way_back(form: str, placement: str, device: str) -> None:
    model = Tower(width=64).to(torch.bfloat16)
    x = INPUT.to(torch.bfloat16)
    untouched, before, loaded = model(x), imprint(model), weight_bytes(model)
    fitted = fit(model, plan={"components": {"model": {"storage": form, "placement": placement}}}, device=device)
    assert weight_bytes(model) < 0.6 * loaded
    assert 0 < relative_error(model(x).float(), untouched.float()) < 0.2
    assert fitted.report().trace.lossy == (f"fp8: model is stored in {form}",)
    assert fitted.plan.lossy == (f"fp8: model is stored in {form}",)
    fitted.undo()
    assert_same(before, imprint(model))
    assert torch.equal(model(x), untouched)


def test_fp8_crosses_the_link_as_fp8() -> None:
    model = Tower(width=64)
    fitted = fit(model, plan={"components": {"model": {"placement": "stream"}}}, device="loopback")
    model(INPUT)
    plain = sum(phase.bytes_in for phase in fitted.report().trace.phases)
    fitted = fit(
        model, plan={"components": {"model": {"placement": "stream", "storage": "float8_e4m3fn"}}}, device="loopback"
    )
    model(INPUT)
    assert sum(phase.bytes_in for phase in fitted.report().trace.phases) < 0.35 * plain


def test_the_halving_is_measured_on_the_device() -> None:
    model = Tower(width=128).to(torch.bfloat16)
    peaks = {}
    for storage in ("as-loaded", "float8_e4m3fn"):
        fitted = fit(model, plan={"components": {"model": {"storage": storage}}}, device="loopback")
        model(INPUT.to(torch.bfloat16))
        peaks[storage] = fitted.report().trace.phases[0].peak_weights
        fitted.undo()
    assert peaks["float8_e4m3fn"] < 0.55 * peaks["as-loaded"]


def test_a_compute_dtype_of_its_own() -> None:
    model = Tower()
    untouched, before = model(INPUT), imprint(model)
    plan = {"components": {"model": {"storage": "float8_e4m3fn", "compute_dtype": "bfloat16"}}}
    fitted = fit(model, plan=plan, device="cpu")
    assert {tensor.dtype for tensor in [*model.parameters(), *model.buffers()]} == {torch.bfloat16}
    output = model(INPUT)
    assert output.dtype == torch.float32
    assert relative_error(output, untouched) < 0.2
    fitted.undo()
    assert_same(before, imprint(model))


def test_what_the_skip_patterns_name_stays_as_loaded() -> None:
    model = Tower()
    plan = {
        "components": {
            "model": {"storage": "float8_e4m3fn", "skip_patterns": ["blocks", "out", "tied", "kernel", "embed"]}
        }
    }
    untouched = model(INPUT)
    fit(model, plan=plan, device="cpu")
    assert torch.equal(model(INPUT), untouched)


def flux(blocks: int, heads: int) -> FluxTransformer2DModel:
    """A Flux transformer with random weights in bfloat16."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=64 * heads,
        num_layers=blocks // 4 + 1,
        num_single_layers=blocks,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    return model.to(torch.bfloat16).requires_grad_(False)


def test_by_default_the_ends_of_a_model_stay_and_its_blocks_are_stored_with_their_modulation() -> None:
    model = flux(blocks=1, heads=1)
    fit(model, plan={"components": {"model": {"storage": "float8_e4m3fn"}}}, device="cpu")
    stored = {name for name, value in model.named_parameters() if isinstance(value.data, Float8Weight)}
    resident = {name for name, value in model.named_parameters() if value.ndim > 1} - stored
    assert {name.split(".")[0] for name in stored} == {"transformer_blocks", "single_transformer_blocks"}
    assert {"transformer_blocks.0.norm1.linear.weight", "single_transformer_blocks.0.norm.linear.weight"} <= stored
    assert {name.split(".")[0] for name in resident} == {
        "time_text_embed", "context_embedder", "x_embedder", "norm_out", "proj_out",
    }  # fmt: skip


def test_a_hundred_million_parameters_are_halved() -> None:
    model = flux(blocks=16, heads=8)
    parameters, loaded = sum(parameter.numel() for parameter in model.parameters()), weight_bytes(model)
    assert parameters > 100e6
    fitted = fit(model, plan={"components": {"model": {"storage": "float8_e5m2"}}}, device="cpu")
    assert weight_bytes(model) < 0.52 * loaded
    fitted.undo()
    assert weight_bytes(model) == loaded


def test_units_are_the_elements_of_the_outermost_lists() -> None:
    assert list(find_blocks(Tower())) == ["blocks.0", "blocks.1", "blocks.2"]
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), Block(4)]), "b": nn.Linear(1, 1)})
    outer = nn.Sequential()
    outer.add_module("parts", nested)
    assert list(find_blocks(outer)) == ["parts.a.0.0", "parts.a.1", "parts.b"]


def test_parts_of_encoders_are_watched_down_to_their_blocks() -> None:
    """A pipeline may call a norm at the end by itself, but nothing inside of a block."""
    parts = find_parts("text_encoder", CASES[0].make().text_encoder)
    ends = {path.rpartition("layers.")[2] for path in parts if "layers." in path}
    assert ends
    assert all(end.isdecimal() for end in ends)
    assert any(path.endswith("final_layer_norm") for path in parts)


class Forgetting:
    """A cargo on the loopback card, and what it did to its module."""

    def __init__(self, model: nn.Module) -> None:
        self.recorder = Recorder(LoopbackDevice())
        self.loader = TensorLoader(model, LoopbackDevice(), self.recorder)


def test_bringing_twice_is_once_and_tied_weights_come_once() -> None:
    model = Tower()
    forgetting = Forgetting(model)
    forgetting.loader.load()
    forgetting.loader.load()
    assert forgetting.recorder.weights == weight_bytes(model)
    assert model.out.weight is model.tied.weight
    forgetting.loader.evict()
    assert forgetting.recorder.weights == 0


def test_eviction_is_forgetting_but_writes_are_kept() -> None:
    model = Tower()
    master = model.out.weight
    values = master.clone()
    forgetting = Forgetting(model)
    forgetting.loader.load()
    assert model.out.weight is not master
    forgetting.loader.evict()
    assert model.out.weight is master
    assert torch.equal(master, values)
    forgetting.loader.load()
    model.out.weight.add_(1.0)
    forgetting.loader.evict()
    assert torch.equal(master, values + 1.0)


def test_a_parameter_replaced_while_it_was_here_stays_replaced() -> None:
    model = Tower()
    forgetting = Forgetting(model)
    forgetting.loader.load()
    new = model.kernel.weight = nn.Parameter(torch.zeros_like(model.kernel.weight))
    forgetting.loader.evict()
    assert model.kernel.weight is new


def test_originals_wait_on_disk_only_where_ram_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[torch.Tensor] = []
    write = SpillFile.write
    monkeypatch.setattr(SpillFile, "write", lambda self, tensor: written.append(tensor.clone()) or write(self, tensor))
    storage = {"components": {"model": {"storage": "float8_e4m3fn"}}}
    fit(Tower(), plan=storage, device="loopback")
    assert not written
    model = Tower()
    originals = [parameter.detach().clone() for parameter in model.parameters()]
    fitted = fit(model, plan=storage, device="cpu")
    stored = [parameter for parameter in model.parameters() if isinstance(parameter, StoredWeight)]
    assert len(written) == len(stored) > 1
    fitted.undo()
    assert all(map(torch.equal, model.parameters(), originals))
    assert not CpuDevice().separate


def test_originals_with_gaps_between_their_numbers_come_back() -> None:
    model = Tower()
    weight = model.embed_in.weight = nn.Parameter(torch.randn(32, 16)[:, ::2], requires_grad=False)
    values, strides = weight.detach().clone(), weight.stride()
    fitted = fit(model, plan={"components": {"model": {"storage": "float8_e4m3fn", "skip_patterns": []}}}, device="cpu")
    assert isinstance(model.embed_in.weight, StoredWeight)
    fitted.undo()
    assert model.embed_in.weight is weight
    assert torch.equal(weight, values)
    assert weight.stride() == strides
