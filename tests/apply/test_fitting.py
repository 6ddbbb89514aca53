"""The life of a fitted pipeline: twice in a row, interrupted, collected, with LoRAs and shared parts."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inspection import assert_same, imprint, relative_error
from tightfit import AlreadyFitted, Fitted, InputError, Plan, PlanError, RunError, fit
from tightfit.measure.modules import inspect_component, weight_bytes
from tiny_pipelines import CASES, TinyCase, run

SD: TinyCase = next(case for case in CASES if case.name == "StableDiffusion")


def moved(fitted: Fitted) -> int:
    return sum(phase.bytes_in for phase in fitted.report().trace.phases)


JOURNEYS = {torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.copy_.default}


class NoHostReads(TorchDispatchMode):
    """Fails when arithmetic reads a weight at its home in host memory instead of its copy on the device."""

    def __init__(self, stores: set[int]) -> None:
        super().__init__()
        self.stores = stores

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in JOURNEYS:
            for value in args:
                if isinstance(value, torch.Tensor) and value.numel():
                    assert value.untyped_storage().data_ptr() not in self.stores, f"{func} read a weight at home"
        return func(*args, **(kwargs or {}))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_at_level_3_arithmetic_reads_only_what_was_brought(case: TinyCase) -> None:
    pipe = case.make()
    fit(pipe, level=3, device="loopback")
    stores = {
        t.untyped_storage().data_ptr()
        for m in pipe.components.values()
        if isinstance(m, nn.Module)
        for t in m.parameters()
    }
    with NoHostReads(stores):
        run(pipe, case)


def test_the_guard_itself_notices() -> None:
    pipe = SD.make()
    stores = {t.untyped_storage().data_ptr() for t in pipe.unet.parameters()}
    with NoHostReads(stores), pytest.raises(AssertionError, match="at home"):
        run(pipe, SD)


def test_level_3_needs_less_than_level_0_and_counts_what_moves() -> None:
    pipe = SD.make()
    fitted = fit(pipe, level=0, device="loopback")
    run(pipe, SD)
    whole = fitted.report().trace
    assert moved(fitted) == 0
    fitted = fit(pipe, level=3, device="loopback")
    run(pipe, SD)
    streamed = fitted.report().trace
    assert streamed.peak_bytes < 0.7 * whole.peak_bytes
    run(pipe, SD)  # by now the order is known
    denoise = next(phase for phase in fitted.report().trace.phases if phase.name == "denoise")
    skips = denoise.bytes_out
    assert skips > 0
    chosen = fitted.plan.components["unet"]
    layers = {layer.name: layer.bytes for layer in inspect_component("unet", pipe.unet).layers}
    assert chosen.resident_layers is not None
    assert chosen.ring_buffer is not None
    once = sum(layers[name] for name in chosen.resident_layers) + weight_bytes(pipe.unet) - sum(layers.values())
    each = sum(size for name, size in layers.items() if name not in chosen.resident_layers)
    padding = 3 * 128 * 2 * len(layers)
    assert 0 <= denoise.bytes_in - (once + 2 * each + skips) <= chosen.ring_buffer + padding
    assert denoise.on_demand == 0
    assert denoise.peak_weights < 0.4 * weight_bytes(pipe.unet)


def test_the_same_fit_twice_replaces_itself() -> None:
    pipe = SD.make()
    untouched, before = run(pipe, SD), imprint(pipe)
    first = fit(pipe, level=3, device="loopback")
    second = fit(pipe, level=3, device="loopback")
    assert not first.fitted
    assert second.fitted
    assert relative_error(run(pipe, SD), untouched) <= 1e-5
    first.undo()
    assert second.fitted
    second.undo()
    second.undo()
    assert_same(before, imprint(pipe))


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    pipe = SD.make()
    untouched, before = run(pipe, SD), imprint(pipe)
    fitted = fit(pipe, plan={"level": 3, "vae": {"slicing": False}}, device="loopback")

    def interrupt(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(**SD.call(), callback_on_step_end=interrupt)
    assert fitted.live().weights == 0
    assert torch.equal(run(pipe, SD), untouched)
    fitted.undo()
    assert_same(before, imprint(pipe))


def test_an_error_inside_a_unit_leaves_nothing_behind() -> None:
    pipe = SD.make()
    untouched = run(pipe, SD)
    fitted = fit(pipe, plan={"level": 3, "vae": {"slicing": False}}, device="loopback")
    handle = pipe.unet.up_blocks[0].resnets[0].register_forward_pre_hook(_fail)
    with pytest.raises(ArithmeticError):
        run(pipe, SD)
    handle.remove()
    assert fitted.live().weights == 0
    assert torch.equal(run(pipe, SD), untouched)


def _fail(*_: Any) -> None:
    raise ArithmeticError


def test_a_fitted_pipeline_can_be_collected() -> None:
    pipe = SD.make()
    fit(pipe, level=3, device="loopback")
    run(pipe, SD)
    ghost, unet = weakref.ref(pipe), weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert ghost() is None
    assert unet() is None


def lora_of(pipe: Any) -> dict[str, torch.Tensor]:
    """A LoRA for the UNet that visibly changes the picture, as a state dict."""
    torch.manual_seed(1)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "made")
    state = {
        f"unet.{key}": value.clone() for key, value in get_peft_model_state_dict(pipe.unet, adapter_name="made").items()
    }
    pipe.unet.delete_adapters("made")
    return state


LORA_PLANS = {
    "level 0": {"level": 0},
    "level 3": {"level": 3, "vae": {"slicing": False}},
    "channels-last": {"components": {"unet": {"channels_last": True}}},
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", LORA_PLANS.values(), ids=LORA_PLANS)
def test_a_lora_loaded_before_or_after(plan: dict[str, Any], when: str) -> None:
    lora = lora_of(SD.make())
    pipe = SD.make()
    plain = run(pipe, SD)
    pipe.load_lora_weights(lora)
    untouched = run(pipe, SD)
    assert relative_error(untouched, plain) > 1e-3
    if when == "after":
        pipe.unload_lora_weights()
    fitted = fit(pipe, plan=plan, device="loopback")
    if when == "after":
        pipe.load_lora_weights(lora)
    assert relative_error(run(pipe, SD), untouched) <= 1e-5
    fitted.undo()
    assert torch.equal(run(pipe, SD), untouched)
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe, SD), plain)


def test_a_lora_fused_while_fitted_stays_fused_after_undo() -> None:
    lora = lora_of(SD.make())
    pipe, reference = SD.make(), SD.make()
    for each in (pipe, reference):
        each.load_lora_weights(lora)
    reference.fuse_lora()
    fitted = fit(pipe, level=3, device="loopback")
    pipe.fuse_lora()
    assert relative_error(run(pipe, SD), run(reference, SD)) <= 1e-5
    fitted.undo()
    assert torch.equal(run(pipe, SD), run(reference, SD))


def test_a_lora_over_stored_weights() -> None:
    lora = lora_of(SD.make())
    pipe = SD.make()
    pipe.load_lora_weights(lora)
    untouched = run(pipe, SD)
    fitted = fit(pipe, plan={"components": {"unet": {"storage": "float8_e4m3fn"}}}, device="loopback")
    stored = run(pipe, SD)
    assert 0 < relative_error(stored, untouched) < 0.3
    fitted.undo()
    assert torch.equal(run(pipe, SD), untouched)


def test_two_pipelines_cannot_both_lead_the_same_parts() -> None:
    pipe = SD.make()
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    fitted = fit(pipe, level=2, device="loopback")
    with pytest.raises(AlreadyFitted, match="vae already follows the plan of another pipeline"):
        fit(other, level=2, device="loopback")
    fitted.undo()
    fit(other, level=2, device="loopback").undo()


def test_a_controlnet_and_its_unet_stay_together() -> None:
    base = SD.make()
    torch.manual_seed(0)
    net = diffusers.ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=(8, 8, 16)).eval()
    with torch.no_grad():
        for block in (*net.controlnet_down_blocks, net.controlnet_mid_block):
            block.weight.normal_()
    pipe = diffusers.StableDiffusionControlNetPipeline(**base.components, controlnet=net, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    arguments = {
        "image": picture,
        "num_inference_steps": 6,
        "output_type": "pt",
        "prompt": "ab",
        "height": 64,
        "width": 64,
    }

    def draw() -> torch.Tensor:
        return pipe(**arguments, generator=torch.Generator().manual_seed(0)).images

    untouched = draw()
    fitted = fit(pipe, level=3, device="loopback")
    assert torch.equal(draw(), untouched)
    trace = fitted.report().trace
    assert any("take turns" in note for note in trace.notes)
    assert [phase.name for phase in trace.phases] == ["encode", "denoise", "decode"]


def test_a_component_can_be_kept_on_the_device() -> None:
    pipe = SD.make()
    fitted = fit(pipe, plan={"level": 3, "components": {"vae": {"placement": "resident"}}}, device="loopback")
    assert fitted.plan.components["vae"].placement == "resident"
    assert fitted.plan.components["unet"].placement == "stream"
    run(pipe, SD)
    phases = {phase.name: phase for phase in fitted.report().trace.phases}
    assert phases["decode"].bytes_in == 0
    whole = weight_bytes(pipe.vae) + weight_bytes(pipe.text_encoder)
    assert whole <= phases["encode"].peak_weights <= 1.05 * whole


def test_a_plan_that_only_names_its_level_is_that_level() -> None:
    pipe = SD.make()
    named = fit(pipe, plan=Plan(level=3), device="loopback").plan
    assert named == fit(pipe, level=3, device="loopback").plan
    assert named == fit(pipe, plan=named).plan


def test_on_the_cpu_offloading_means_nothing_and_says_so() -> None:
    fitted = fit(SD.make(), level=3, device="cpu")
    assert all(component.placement == "resident" for component in fitted.plan.components.values())
    assert any("the device computes in host memory" in reason.because for reason in fitted.plan.reasons)


def test_one_module_alone() -> None:
    vae = SD.make().vae
    latents = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        untouched = vae.decode(latents).sample
        fitted = fit(vae, level=3, device="loopback")
        sample = vae.decode(latents).sample
        assert relative_error(sample, untouched) <= 1e-5
        assert [phase.name for phase in fitted.report().trace.phases] == ["decode"]
        assert 0 < fitted.live().weights <= 1.05 * weight_bytes(vae)  # nobody else wants the place
        fitted.undo()
        assert fitted.live().weights == 0
        assert torch.equal(vae.decode(latents).sample, untouched)


def test_one_log_line_for_each_call(caplog: pytest.LogCaptureFixture) -> None:
    pipe = SD.make()
    fit(pipe, level=2, device="loopback")
    with caplog.at_level(logging.INFO, logger="tightfit"):
        run(pipe, SD)
        run(pipe, SD)
    lines = [record.getMessage() for record in caplog.records if record.name == "tightfit"]
    assert len(lines) == 2
    assert "peak_bytes=" in lines[0]
    assert "call=2" in lines[1]


def test_activations_need_not_be_counted() -> None:
    pipe = SD.make()
    fitted = fit(pipe, level=3, device="loopback", count_activations=False)
    run(pipe, SD)
    trace = fitted.report().trace
    assert all(phase.peak_bytes == phase.peak_weights > 0 for phase in trace.phases)
    assert all(sample.activations == 0 for sample in trace.samples)
    assert moved(fitted) > 0
    assert any("activations were not counted" in note for note in trace.notes)


def test_fitted_pipelines_refuse_to_be_moved() -> None:
    pipe = SD.make()
    fit(pipe, level=3, device="loopback")
    assert pipe.to("cpu") is pipe  # where it runs
    with pytest.raises(AlreadyFitted, match=r"runs it on cpu: undo\(\) before to\('meta'\)"):
        pipe.to("meta")


def test_no_report_before_the_first_call() -> None:
    with pytest.raises(RunError, match="call the pipeline first"):
        fit(SD.make(), level=0, device="cpu").report()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 1, "plan": Plan()}, "exactly one of level"),
        ({"level": 4}, "level must be less than or equal to 3"),
        ({"plan": {"components": {"unett": {}}}}, "did you mean 'unet'"),
        ({"plan": {"vae": {"tils": 3}}}, "did you mean 'tile'"),
        ({"level": 1, "device": "cudda"}, "did you mean 'cuda'"),
        ({"level": 1, "request": {"heigth": 3}}, "did you mean 'height'"),
        ({"plan": "no/such/file.yaml"}, "cannot read the plan"),
    ],
)
def test_illegal_fits_say_what_would_be_legal(arguments: dict[str, Any], message: str) -> None:
    pipe = SD.make()
    before = imprint(pipe)
    with pytest.raises(InputError, match=message):
        fit(pipe, **arguments)
    assert_same(before, imprint(pipe))


def test_only_pipelines_and_modules_are_fitted() -> None:
    with pytest.raises(PlanError, match="not str"):
        fit("pipe", level=0)


@pytest.mark.parametrize("other", ["another plan", "undone"])
def test_a_method_that_its_owner_kept_outlasts_the_plan(other: str) -> None:
    """As `decode = vae.decode; vae.decode = lambda …: decode(…)` does, and `draw = pipe.__call__`."""
    pipe = SD.make()
    wanted = run(pipe, SD)
    fitted = fit(pipe, level=3, device="loopback")
    calls, decode, call = list[str](), pipe.vae.decode, pipe.__call__

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append("decode")
        return decode(*args, **kwargs)

    pipe.vae.decode = counting
    if other == "undone":
        fitted.undo()
    else:
        fitted.follow(pipe, fit(SD.make(), level=0, device="loopback").plan)
    for draw in (pipe, call):
        assert torch.equal(draw(**SD.call())[0].float(), wanted)
    assert calls == ["decode", "decode"]
    if other == "another plan":
        assert [phase.name for phase in fitted.report().trace.phases] == ["encode", "denoise", "decode"]
        fitted.undo()
    assert all(each.device.type == "cpu" for each in pipe.vae.parameters())
