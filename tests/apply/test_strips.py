"""Autoencoders strip by strip: the same numbers, and the less memory the more strips there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inspection import assert_same, imprint
from tightfit import Plan, PlanError, fit
from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips import export_graph as capturing
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph, capture
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.statistics import Statistics, normalise
from tightfit.apply.activations.strips.strip_plan import find_strip_plan
from tightfit.apply.activations.strips.workarounds import avg_pool3d
from tightfit.schema.footprint import FeatureMaps
from tiny_autoencoders import CASES, TinyAutoencoder, decode, encode

ROUNDING = 1e-5  # of the largest value, float32
SMALLEST, ONE_STRIP = 1, 10**12  # bytes for strips


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[TinyAutoencoder, nn.Module]:
    case = next(case for case in CASES if case.name == name)
    return case, case.make().eval()


def ways(case: TinyAutoencoder, model: nn.Module, rows: int, batch: int) -> dict[str, Callable[[], torch.Tensor]]:
    rows = case.only_rows or max(rows // case.granule * case.granule, case.least_rows)

    def decoding() -> torch.Tensor:
        torch.manual_seed(0)  # some draw noise
        return decode(model, case, case.latents(rows, batch), batch)

    encoding = {"encode": lambda: encode(model, case.pixels(rows, batch))}
    return {"decode": decoding, **(encoding if case.encodes else {})}


def assert_near(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    for method, want in whole.items():
        assert found[method].shape == want.shape
        assert float((found[method] - want).abs().max()) <= ROUNDING * float(want.abs().max()), method


# one with group norms and attention, and one in which nothing needs all rows; test_every_autoencoder.py has them all
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderTiny"])
def test_strips_give_the_same_numbers(name: str) -> None:
    case, model = prepared(name)
    methods = ways(case, model, 7, 3)
    whole, before = {method: work() for method, work in methods.items()}, imprint(model)
    for strips, maps, device in ((SMALLEST, "host", "loopback"), (ONE_STRIP, "device", "cpu")):
        fitted = fit(model, plan={"vae": {"strips": strips, "feature_maps": maps}}, device=device)
        for method, work in methods.items():
            found = work()
            assert torch.equal(found, work())
            trace = fitted.report().trace
            assert_near({method: found}, {method: whole[method]})
            assert trace.notes == ()
            assert trace.lossy == ()
        fitted.undo()
        assert_same(before, imprint(model))


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLCogVideoX"])
def test_strips_of_double_precision_differ_by_its_rounding(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    model = case.make().eval().double()
    rows = max(7 // case.granule * case.granule, case.least_rows)

    def decoding() -> torch.Tensor:
        with torch.no_grad():
            return model.decode(case.latents(rows, 1).double()).sample

    whole = decoding()
    fit(model, plan={"vae": {"strips": SMALLEST}}, device="cpu")
    assert whole.dtype == torch.float64
    assert float((decoding() - whole).abs().max()) <= 1e-12 * float(whole.abs().max())


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({"placement": "offload"}, "loopback"),
        ({"placement": "stream"}, "loopback"),
        ({"placement": "stream", "offload_to": "disk"}, "cpu"),
        ({"channels_last": True}, "cpu"),
    ],
)
def test_strips_work_wherever_weights_are(changes: dict[str, Any], device: str) -> None:
    case, model = prepared("AutoencoderKL without attention")
    whole = decode(model, case, case.latents(6, 1), 1)
    plan = {"components": {"model": changes}, "vae": {"strips": 30_000}}
    fitted = fit(model, plan=plan, device=device)
    assert_near({"decode": decode(model, case, case.latents(6, 1), 1)}, {"decode": whole})
    assert fitted.report().trace.notes == ()
    fitted.undo()


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_the_first_call_knows_the_order_of_layers_in_strips(granularity: str) -> None:
    case, model = prepared("AutoencoderKL without attention")
    plan = {"placement": "stream", "granularity": granularity}
    fitted = fit(model, plan={"components": {"model": plan}, "vae": {"strips": 30_000}}, device="loopback")
    traces = []
    for batch in (1, 1, 2):
        decode(model, case, case.latents(6, batch), batch)
        traces.append(fitted.report().trace)
    fitted.undo()
    assert [trace.phases[0].on_demand for trace in traces] == [0, 0, 0]
    assert [trace.notes for trace in traces] == [(), (), ()]


def test_strips_of_stored_weights_are_those_of_whole_pictures() -> None:
    case, model = prepared("AutoencoderKL without attention")
    stored = {"components": {"model": {"storage": "float8_e4m3fn"}}}
    made = []
    for vae in ({}, {"strips": 30_000}):
        fitted = fit(model, plan=stored | {"vae": vae}, device="cpu")
        made.append({"decode": decode(model, case, case.latents(6, 1), 1)})
        assert fitted.report().trace.notes == ()
        fitted.undo()
    assert_near(made[1], made[0])


class Blocks(nn.Module):
    """A network of its own, as an autoencoder: `decode` is what is tried out."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = act

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, self.conv(x))  # type: ignore[no-any-return]


UP = torch.randn(8, 8, 4, 3)
WIDE = torch.randn(8, 8, 7, 3)


def filled(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(*x.shape[:2], 2 * x.shape[2], x.shape[3], device=x.device)
    made[:, :, ::2] = x
    made[:, :, 1::2] = x.new_full(x.shape, 3.0)
    return self.norm(
        made + torch.ones_like(made) + x.new_zeros(made.shape) + torch.full(made.shape, 2.0, device=x.device)
    )  # type: ignore[no-any-return]


def overwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([x[:, :, :1].expand(-1, -1, 7, -1) + 1, x], 2)
    joined[:, :, 7:] = joined[:, :, 7:] * 2 + x
    joined[:, :, 2:4] = 0.5
    return joined * 3


def turned(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As rotary embeddings turn pairs of channels."""
    pairs = torch.view_as_complex(x.permute(0, 2, 3, 1).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(4), torch.arange(4.0)).to(x.device)).flatten(-2)


KINDS = {
    "made of nothing": filled,
    "some rows written over": overwritten,
    "turned as complex numbers": turned,
    "measured beside work that is done whole": lambda self, x: self.norm(x) + x.flip(2).cumsum(2),
    "reflected border": lambda self, x: F.conv2d(F.pad(x, (1, 1, 2, 3), mode="reflect"), WIDE),
    "replicated border": lambda self, x: F.conv2d(F.pad(x, (1, 1, 3, 3), mode="replicate"), WIDE),
    "constant border": lambda self, x: F.conv2d(F.pad(x, (0, 0, 5, 9), value=3.0), WIDE),
    "cropped": lambda self, x: F.pad(x, (0, 0, -2, -1)),
    "every second row": lambda self, x: F.conv2d(x, WIDE, stride=(2, 1), padding=(3, 1)),
    "dilated": lambda self, x: F.conv2d(x, WIDE[:, :, :3], dilation=(3, 1), padding=(3, 1)),
    "transposed": lambda self, x: F.conv_transpose2d(x, UP, stride=(2, 1), padding=(1, 1), output_padding=(1, 0)),
    "pooled": lambda self, x: F.avg_pool2d(x, 2),
    "nearest": lambda self, x: F.interpolate(x, scale_factor=(3.0, 1.0), mode="nearest"),
    "shuffled": lambda self, x: F.pixel_unshuffle(F.pixel_shuffle(torch.cat([x] * 2, 1), 4), 2),
    "interleaved": lambda self, x: x.repeat_interleave(3, 2),
    "some rows": lambda self, x: x[:, :, 3:-1:2],
    "two heads": lambda self, x: x.unflatten(1, (2, 4)).flatten(2, 3)[:, :, ::4],
    "norm of all rows": lambda self, x: self.norm(self.norm(x) * x),
    "mean of all rows": lambda self, x: x - x.mean((2, 3), keepdim=True),
    "backwards": lambda self, x: x + x.flip(2),
    "tokens": lambda self, x: F.softmax(x.flatten(2).transpose(1, 2) @ x.flatten(2), -1) @ x.flatten(2).transpose(1, 2),
    "positions": lambda self, x: x + torch.arange(x.shape[2], device=x.device)[:, None] * 0.1,
    "written in place": lambda self, x: x.relu_().mul_(2),
    "more where it is higher": lambda self, x: F.relu(x) if x.shape[2] < 15 else F.relu(x[:, :, :9].sum(2, True) + x),
    "a part written": lambda self, x: x.index_fill(1, torch.tensor([1], device=x.device), 0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_operation_in_strips(kind: str) -> None:
    model = Blocks(KINDS[kind]).eval()
    x = torch.randn(1, 4, 12, 5)
    whole = model.decode(x.clone()).detach()
    for strips in (SMALLEST, ONE_STRIP):
        fitted = fit(model, plan={"vae": {"strips": strips}}, device="cpu")
        with torch.no_grad():
            found = model.decode(x.clone())
        notes = fitted.report().trace.notes
        fitted.undo()
        assert notes == (), kind
        assert torch.allclose(found, whole, rtol=0, atol=ROUNDING * float(whole.abs().max()))


@pytest.mark.parametrize(("device", "maps"), [("cpu", "device"), ("cpu", "recompute"), ("loopback", "host")])
def test_the_course_knows_its_peak(device: str, maps: FeatureMaps) -> None:
    case, model = prepared("AutoencoderKL without attention")
    strip_plan = find_strip_plan(program_of(16), 100_000, maps)
    fitted = fit(model, plan={"vae": {"strips": 100_000, "feature_maps": maps}}, device=device)
    decode(model, case, case.latents(16, 1), 1)
    (phase,) = fitted.report().trace.phases
    fitted.undo()
    peak = phase.peak_bytes - phase.peak_weights
    small = 4096  # what has no rows: statistics of a few groups
    assert 0.8 * strip_plan.peak.device <= peak <= strip_plan.peak.device + small


@pytest.mark.parametrize("strips", [ONE_STRIP, 50_000])
@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect"])
def test_a_border_all_around_is_one_copy(mode: str, strips: int) -> None:
    model = Blocks(lambda self, x: F.conv2d(F.pad(x, (1, 1, 3, 3), mode=mode), WIDE)).eval()
    x = torch.randn(1, 4, 48, 40)
    program = capture(without_weights(model), lambda double, x: [double.decode(x)], [x.to("meta")])
    strip_plan = find_strip_plan(program, strips, "device")
    fitted = fit(model, plan={"vae": {"strips": strips}}, device="cpu")
    with torch.no_grad():
        model.decode(x)
    (phase,) = fitted.report().trace.phases
    fitted.undo()
    assert 0.9 * strip_plan.peak.device <= phase.peak_bytes - phase.peak_weights <= strip_plan.peak.device


@functools.cache
def program_of(rows: int) -> Program:
    case, model = prepared("AutoencoderKL without attention")
    double = without_weights(model, type(model))
    call = lambda double, x: [double.decode(x, return_dict=False)[0]]  # noqa: E731
    return capture(double, call, [case.latents(rows, 1).to("meta")])


def test_a_peak_does_not_grow_with_height_but_by_what_is_kept() -> None:
    beside_output, in_host_memory = [], []
    for rows in (16, 32, 64):
        program = program_of(rows)
        strip_plan = find_strip_plan(program, 1, "host")
        beside_output.append(strip_plan.peak.device - program.nodes[program.outputs[0]].bytes)
        in_host_memory.append(strip_plan.peak.host)
    assert max(beside_output) <= 1.05 * min(beside_output)
    assert in_host_memory[2] > 3.5 * in_host_memory[0]


@pytest.mark.parametrize("vae", [{"strips": SMALLEST}, {"slicing": True}], ids=["strips", "slicing"])
def test_what_gives_one_number_for_a_batch_is_given_all_of_it(vae: dict[str, Any]) -> None:
    model = Blocks(lambda self, x: (self.norm(x), x.square().mean()))
    x = torch.randn(3, 4, 12, 5)
    with torch.no_grad():
        whole, loss = model.decode(x)
        fitted = fit(model, plan={"vae": vae}, device="cpu")
        found, found_loss = model.decode(x)
    fitted.undo()
    assert_near({"decode": found, "loss": found_loss}, {"decode": whole, "loss": loss})


def test_attention_is_no_noise() -> None:
    case, model = prepared("AutoencoderKL")
    call = lambda double, x: [double.decode(x, return_dict=False)[0]]  # noqa: E731
    program = capture(without_weights(model), call, [case.latents(6, 1).to("meta")])
    assert any("attention" in node.op for node in program.nodes)
    assert not program.draws_noise


def test_what_would_take_too_long_to_export_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "MOST_OPERATIONS", 2)
    fitted = fit(model := Blocks(lambda _, x: x * 2 + 3), plan={"vae": {"strips": SMALLEST}}, device="cpu")
    with torch.no_grad():
        model.decode(torch.ones(1, 4, 8, 8))
    why = "decode runs whole: it does 3 operations, and to export more than 2 takes too long"
    assert fitted.report().trace.notes == (why,)
    fitted.undo()


def test_more_memory_means_fewer_strips() -> None:
    strip_plans = [find_strip_plan(program_of(16), size, "device") for size in (1, 10**5, 10**6, 10**9)]
    counts = [strip_plan.most_strips for strip_plan in strip_plans]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 10
    assert counts[-1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
def test_group_norm_of_strips_where_the_mean_is_large(mean: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 8, 24, 10) + mean).to(dtype)
    weight, bias = torch.rand(8) + 0.5, torch.randn(8)
    exact = F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-6)
    native = F.group_norm(x, 4, weight.to(dtype), bias.to(dtype), 1e-6).double()
    for height in (1, 5, 24):
        statistics = Statistics(4)
        for strip in x.split(height, 2):
            statistics.take(strip)
        known = statistics.known()
        parts = [normalise(part, known, 4, 1e-6, weight.to(dtype), bias.to(dtype)) for part in x.split(height, 2)]
        ours = torch.cat(parts, 2).double()
        assert (ours - exact).abs().max() <= 3 * (native - exact).abs().max()


def test_what_cannot_be_taken_apart_runs_whole_and_says_so() -> None:
    model = Blocks(lambda self, x: x * float(x.abs().max() > 0)).eval()  # looks at values
    x = torch.randn(1, 4, 12, 5)
    whole = model.decode(x).detach()
    fitted = fit(model, plan={"vae": {"strips": 1}}, device="cpu")
    with torch.no_grad():
        assert torch.equal(model.decode(x), whole)
    (note,) = fitted.report().trace.notes
    assert note.startswith("decode runs whole: torch.export: ")
    fitted.undo()


def test_where_tiles_are_allowed_they_stand_in(tmp_path: Path) -> None:
    case, model = prepared("AutoencoderKL without attention")
    broken = lambda *_: (_ for _ in ()).throw(UnsupportedGraph("today"))  # noqa: E731
    fitted = fit(model, plan={"vae": {"strips": 1, "tile": 16}}, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where the reason is kept
        patch.setattr("tightfit.apply.activations.strips.called_program.capture", broken)
        decode(model, case, case.latents(8, 1), 1)
    trace = fitted.report().trace
    fitted.undo()
    assert trace.notes == ("decode runs whole: today",)
    assert trace.lossy == ("blended-tiling: decoded in tiles of 16 px",)


def test_gradients_are_left_to_the_network_itself() -> None:
    model = Blocks(lambda self, x: self.norm(x)).eval()
    fitted = fit(model, plan={"vae": {"strips": 1}}, device="cpu")
    x = torch.randn(1, 4, 8, 5, requires_grad=True)
    model.decode(x).sum().backward()
    assert x.grad is not None
    fitted.undo()


def test_maps_need_strips() -> None:
    with pytest.raises(PlanError, match=r"vae.feature_maps=host needs vae.strips too"):
        Plan.from_mapping({"vae": {"feature_maps": "host"}})


def test_a_method_that_does_something_else_at_another_height_is_not_taken_apart() -> None:
    model = Blocks(lambda self, x: x + 1 if x.shape[2] != 12 else x)
    double = without_weights(model, Blocks)
    with pytest.raises(UnsupportedGraph, match="things at one height and"):
        capture(double, lambda double, x: [double.decode(x)], [torch.empty(1, 4, 12, 5, device="meta")])


def test_work_that_is_cut_into_more_parts_at_another_height_is_taken_apart() -> None:
    parts = lambda x: 1 + (x.shape[2] > 20)  # noqa: E731
    model = Blocks(lambda self, x: torch.cat([part * 2 for part in x.chunk(parts(x), 1)], 1))
    double = without_weights(model, Blocks)
    program = capture(double, lambda double, x: [double.decode(x)], [torch.empty(1, 4, 12, 5, device="meta")])
    assert [node.word for node in program.nodes if node.axis == 2] == ["input", "conv2d", "slice", "mul", "cat"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_are_averaged_in_float32_where_there_is_no_kernel(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 4, 6, 5).to(dtype)
    assert torch.equal(avg_pool3d(x, [2, 2, 1]), F.avg_pool3d(x.float(), (2, 2, 1)).to(dtype))


def test_what_is_done_whole_goes_when_it_is_used_up() -> None:
    flipped = lambda self, x: x.flip(2).cumsum(2).flip(2) * 2  # noqa: E731
    double, given = without_weights(model := Blocks(flipped)), torch.empty(1, 4, 12, 5, device="meta")
    program = capture(double, lambda double, x: [double.decode(x)], [given])
    strip_plan = find_strip_plan(program, SMALLEST, "device")
    one = next(node.bytes for node in program.nodes if node.word == "cumsum")
    assert strip_plan.peak.device < 3.1 * one
    fitted = fit(model, plan={"vae": {"strips": SMALLEST}}, device="cpu")
    with torch.no_grad():
        model.decode(torch.randn(1, 4, 12, 5))
    (phase,) = fitted.report().trace.phases
    fitted.undo()
    assert phase.peak_bytes - phase.peak_weights - 4 * 4 * 12 * 5 <= strip_plan.peak.device
