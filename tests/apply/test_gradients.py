"""Gradients through networks whose weights are loaded and evicted: those of the untouched network."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from a_few import a_few
from gradient_checks import EVERY, PLANS, assert_close, denoiser_call, gradients, trained, with_lora
from inspection import assert_same, imprint, relative_error
from late_device import LateDevice
from tightfit import fit
from tightfit.apply.weights.device_pool import DeviceWeightPool
from tightfit.devices.device import Device
from tightfit.errors import RunError
from tiny_pipelines import TinyCase, run

QUICK = ("StableDiffusion", "StableDiffusionControlNet", "StableDiffusion3", "Flux", "Wan", "LTX", "CogVideoX")


@pytest.fixture(params=["loopback", "late"])
def device(request: pytest.FixtureRequest) -> Device | str:
    return LateDevice() if request.param == "late" else "loopback"


@pytest.mark.one_in(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", a_few([case.name for case in EVERY], *QUICK))
def test_gradients_are_those_of_the_untouched_network(name: str, plan: str, device: Device | str) -> None:
    network, args, kwargs = denoiser_call(name)
    before, wanted = imprint(network), gradients(network, args, kwargs)
    fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device=device)
    try:
        for _ in range(2):
            assert_close(gradients(network, args, kwargs), wanted)
    finally:
        fitted.undo()
    assert fitted.live().weights == 0
    assert_same(before, imprint(network))


# what is done with gradients

STREAM = {"components": {"unet": {"placement": "stream"}, "vae": {"placement": "offload"}}}


def tiny(name: str = "StableDiffusion") -> tuple[TinyCase, Any]:
    case = next(case for case in EVERY if case.name == name)
    return case, case.make()


def guided(pipe: Any, case: TinyCase) -> torch.Tensor:
    """A picture whose latents are moved along the gradient of a loss of the denoiser's prediction, at each step."""

    def guide(pipe: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            latents = tensors["latents"].detach().requires_grad_()
            prompts = tensors["prompt_embeds"].detach()
            both = torch.cat([latents, latents])[: len(prompts)]
            predicted = pipe.unet(both, timestep, encoder_hidden_states=prompts).sample
            picture = pipe.vae.decode(latents).sample
            (gradient,) = torch.autograd.grad(predicted.square().mean() + picture.square().mean(), latents)
        return {"latents": latents.detach() - 100 * gradient}

    kwargs = {"callback_on_step_end": guide, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    picture: torch.Tensor = pipe(**case.call(64), **kwargs)[0]
    return picture.float()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", [1, 2, 3, STREAM], ids=["level 1", "level 2", "level 3", "streamed"])
def test_guidance_by_gradients_in_a_callback(plan: Any, device: Device | str) -> None:
    case, pipe = tiny()
    plain, wanted = run(pipe, case), guided(pipe, case)
    assert not torch.equal(plain, wanted)
    fitted = fit(pipe, **({"level": plan} if isinstance(plan, int) else {"plan": plan}), device=device)
    try:
        first = guided(pipe, case)
        close = 0 if plan is STREAM else 1e-5  # levels decode one item at a time
        assert relative_error(first, wanted) <= close
        assert relative_error(run(pipe, case), plain) <= close
        assert torch.equal(guided(pipe, case), first)
    finally:
        fitted.undo()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lora", ["before", "after"])
@pytest.mark.parametrize("optimizer", ["before", "after"])
@pytest.mark.parametrize("plan", PLANS)
def test_training_a_lora(plan: str, lora: str, optimizer: str, device: Device | str) -> None:
    call = denoiser_call("StableDiffusion")
    network = copy.deepcopy(call[0])
    untouched = copy.deepcopy(network)
    wanted = trained(untouched, call, with_lora(untouched))
    if lora == "before":
        parameters = with_lora(network)
    fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device=device)
    if lora == "after":
        parameters = with_lora(network)
    with torch.no_grad():
        network(*call[1], **call[2])  # e.g. a validation before the training
    if optimizer == "after":
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert trained(network, call, parameters) == wanted
    fitted.undo()
    for (name, found), other in zip(network.named_parameters(), untouched.parameters(), strict=True):
        assert torch.equal(found, other), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", PLANS)
def test_training_everything(plan: str, device: Device | str) -> None:
    call = denoiser_call("StableDiffusion")
    network, untouched = copy.deepcopy(call[0]), copy.deepcopy(call[0])
    for each in (network, untouched):
        each.train()
        for part in each.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.25
    assert any(isinstance(part, nn.Dropout) for part in network.modules())
    wanted = trained(untouched, call, list(untouched.parameters()))
    fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device=device)
    assert trained(network, call, list(network.parameters())) == wanted
    fitted.undo()
    for (name, found), other in zip(network.named_parameters(), untouched.named_parameters(), strict=True):
        assert torch.equal(found, other[1]), name


def test_what_autograd_offers_beside_backward() -> None:
    """Graphs of gradients, and graphs that are used twice."""
    network, args, kwargs = denoiser_call("StableDiffusion")

    def penalty(network: nn.Module) -> tuple[torch.Tensor, ...]:
        latents = args[0].clone().requires_grad_()
        output = network(latents, *args[1:], **kwargs)[0]
        (slope,) = torch.autograd.grad(output.square().mean(), latents, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), latents, retain_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), latents)
        return found, again

    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        wanted = penalty(network)
        for plan in ("kept", "layers", "blocks"):
            fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device=LateDevice())
            try:
                assert all(map(torch.equal, penalty(network), wanted))
            finally:
                fitted.undo()


def test_checkpoints_of_the_user_are_right() -> None:
    call = denoiser_call("StableDiffusion")
    network: Any = copy.deepcopy(call[0])
    wanted = gradients(network, *call[1:])
    network.enable_gradient_checkpointing()
    network.train()
    for plan in ("kept", "layers", "blocks"):
        fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device=LateDevice())
        assert_close(gradients(network, *call[1:]), wanted)
        whole = torch.utils.checkpoint.checkpoint
        assert_close(gradients(functools.partial(whole, network, use_reentrant=False), *call[1:], of=network), wanted)
        fitted.undo()


def test_a_failed_backward_pass_leaves_nothing() -> None:
    call = denoiser_call("StableDiffusion")
    network = copy.deepcopy(call[0])
    wanted = gradients(network, *call[1:])
    fitted = fit(network, plan={"components": {"model": PLANS["layers"]}}, device=LateDevice())
    _, args, kwargs = call
    latents = args[0].clone().requires_grad_()
    latents.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        network(latents, *args[1:], **kwargs)[0].sum().backward()
    assert fitted.live().weights == 0
    network.zero_grad()
    assert_close(gradients(network, *call[1:]), wanted)
    assert fitted.live().weights == 0
    fitted.undo()


@pytest.mark.parametrize("number", [1, 8, 20])
def test_memory_that_runs_out_in_a_backward_pass(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer gets memory by evicting others; what is sent ahead evicts nothing that is needed sooner."""
    network, args, kwargs = denoiser_call("Flux")
    wanted = gradients(network, args, kwargs)
    allocate, fails_at, calls = DeviceWeightPool.extra, [0], [0]

    def extra(pool: DeviceWeightPool, size: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails_at[0]:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(pool, size)

    monkeypatch.setattr(DeviceWeightPool, "extra", extra)
    plan = {"placement": "stream", "granularity": "layer", "gradient_checkpointing": False}
    fitted = fit(network, plan={"components": {"model": plan}}, device=LateDevice())
    for fails_at[0] in (0, 0, number):
        before, calls[0] = calls[0], 0
        assert_close(gradients(network, args, kwargs), wanted)
    assert calls[0] == before + 1
    fitted.undo()


def test_weights_that_change_before_the_backward_pass_are_refused() -> None:
    call = denoiser_call("StableDiffusion")
    network = copy.deepcopy(call[0])
    fitted = fit(network, plan={"components": {"model": PLANS["kept"]}}, device="loopback")
    loss = network(*call[1], **call[2])[0].sum()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    with pytest.raises(RunError, match="were changed between a forward pass and its backward pass"):
        loss.backward()
    fitted.undo()


def test_a_backward_pass_after_undo_is_refused() -> None:
    call = denoiser_call("StableDiffusion")
    network = copy.deepcopy(call[0])
    fitted = fit(network, plan={"components": {"model": PLANS["kept"]}}, device=LateDevice())
    loss = network(*call[1], **call[2])[0].square().mean()
    fitted.undo()
    with pytest.raises(RunError, match=r"call backward\(\) before undo\(\)"):
        loss.backward()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "int8"])
def test_gradients_through_weights_in_eight_bits(storage: str, plan: str) -> None:
    network, args, kwargs = denoiser_call("Flux")
    frozen = copy.deepcopy(network).requires_grad_(False)
    found = []
    for chosen in ({"placement": "resident"}, PLANS[plan]):
        fitted = fit(frozen, plan={"components": {"model": chosen | {"storage": storage}}}, device=LateDevice())
        found.append(gradients(frozen, args, kwargs))
        fitted.undo()
    assert_close(found[1], found[0])


@pytest.mark.parametrize("plan", ["blocks", "offload", "resident"])
def test_gradients_through_compiled_blocks(plan: str) -> None:
    call = denoiser_call("Flux")
    network: Any = copy.deepcopy(call[0])
    network.compile_repeated_blocks(backend="aot_eager")
    wanted = gradients(call[0], *call[1:])
    fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device="loopback")
    for _ in range(2):
        assert_close(gradients(network, *call[1:]), wanted)
    fitted.undo()


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_an_autoencoder_in_strips_has_gradients(method: str) -> None:
    _, pipe = tiny()
    channels, side = (3, 64) if method == "encode" else (4, 16)
    given = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))

    def gradient() -> torch.Tensor:
        asking = given.clone().requires_grad_()
        made = getattr(pipe.vae, method)(asking)
        result = made.latent_dist.mean if method == "encode" else made.sample
        (found,) = torch.autograd.grad(result.square().mean(), asking)
        return found

    wanted = gradient()
    chosen = {"components": {"vae": {"placement": "stream"}}, "vae": {"strips": 2**17}}
    fitted = fit(pipe, plan=chosen, device=LateDevice())
    assert torch.equal(gradient(), wanted)
    assert any("because gradients were asked for" in note for note in fitted.report().trace.notes)
    with torch.no_grad():
        getattr(pipe.vae, method)(given)
    assert not fitted.report().trace.notes
    fitted.undo()


def test_learning_a_word_of_the_text_encoder() -> None:
    """As textual inversion does: the embedding's gradients, through layers that stream."""
    _, pipe = tiny()
    words = torch.randint(0, 50, (2, 77), generator=torch.Generator().manual_seed(0))
    table = pipe.text_encoder.get_input_embeddings().weight
    pipe.text_encoder.requires_grad_(False)
    table.requires_grad_()

    def gradient() -> torch.Tensor:
        pipe.text_encoder(words)[0].square().mean().backward()
        found, table.grad = table.grad, None
        assert found is not None
        return found

    wanted = gradient()
    fitted = fit(pipe, plan={"components": {"text_encoder": {"placement": "stream"}}}, device=LateDevice())
    assert torch.equal(gradient(), wanted)
    fitted.undo()


@pytest.mark.parametrize("plan", ["layers", "blocks", "resident"])
def test_training_with_accelerate(plan: str, tmp_path: Path) -> None:
    """Its `prepare` moves the network and wraps the optimizer; accumulation and clipping as its guides have them."""
    network, args, kwargs = denoiser_call("StableDiffusion")
    losses = {}
    for how in ("plain", plan):
        copied = copy.deepcopy(network)
        parameters = with_lora(copied)
        fitted = None if how == "plain" else fit(copied, plan={"components": {"model": PLANS[plan]}}, device="loopback")
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path)
        model, optimizer = accelerator.prepare(copied, torch.optim.AdamW(parameters, lr=1e-2))
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(6):
            with accelerator.accumulate(model):
                output = model(*args, **kwargs)[0]
                loss = (output - torch.randn(output.shape, generator=generator)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        losses[how] = found
        if fitted is not None:
            fitted.undo()
    assert losses[plan] == losses["plain"]
    assert losses[plan][-1] != losses[plan][0]


class RecordingProcessor(AttnProcessor2_0):  # type: ignore[misc]
    """Records how often attention is computed."""

    times = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        RecordingProcessor.times += 1
        return super().__call__(*args, **kwargs)


def test_attention_that_may_be_recorded_is_computed_once() -> None:
    """Pipelines that guide by attention keep what their processors see; a block that runs twice would tell it twice."""
    network, args, kwargs = denoiser_call("StableDiffusion")
    copied = copy.deepcopy(network)
    for module in copied.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(RecordingProcessor())
    RecordingProcessor.times = 0
    wanted = gradients(copied, args, kwargs)
    times = RecordingProcessor.times
    assert times > 0
    for checkpointing, expected in ((None, times), (True, 2 * times)):
        plan = {"placement": "stream", "gradient_checkpointing": checkpointing}
        fitted = fit(copied, plan={"components": {"model": plan}}, device="loopback")
        RecordingProcessor.times = 0
        assert_close(gradients(copied, args, kwargs), wanted)
        assert expected - times < RecordingProcessor.times <= expected  # some attention is in no block
        fitted.undo()


@pytest.mark.parametrize("plan", PLANS)
def test_weights_that_were_fitted_or_undone_in_inference_mode(plan: str) -> None:
    network, args, kwargs = denoiser_call("StableDiffusion")
    wanted = gradients(copy.deepcopy(network), args, kwargs)
    with torch.inference_mode():
        fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device="loopback")
        network(*args, **kwargs)
    assert_close(gradients(network, args, kwargs), wanted)
    with torch.inference_mode():
        fitted.undo()
    assert_close(gradients(network, args, kwargs), wanted)
