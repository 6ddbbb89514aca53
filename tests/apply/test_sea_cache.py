"""SeaCache: the steps that diffusers skips, the filter by its formula, grids of tokens, noise levels by scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from apply.test_step_caches import BY_NAME, STEPS, denoiser, draw, fit, kept, make
from tightfit.apply.activations.caches import filtered_input, spectra
from tightfit.apply.activations.caches.conditions import SkipCondition
from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline, NoiseLevel
from tightfit.apply.activations.caches.filtered_input import FilteredInput
from tightfit.apply.activations.caches.spectra import filtered, noise_removing_gain
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.apply.activations.caches.token_grid import token_grid

LIKE_DIFFUSERS = {"filters": "latents", "order": 1, "most_skipped": 2, "exponent": 3.0, "first_blocks": 0}


@pytest.mark.parametrize("threshold", [0.1, 0.25, 0.6, 1.5])
def test_the_steps_of_diffusers_are_skipped(threshold: float) -> None:
    """diffusers' SeaCache compares Wan's latents, and continues residuals in a straight line: the same pictures."""
    case = BY_NAME["Wan"]
    theirs = make(case)
    theirs.transformer.enable_cache(diffusers.SeaCacheConfig(threshold=threshold))
    runs: list[int] = []
    theirs.transformer.blocks[1].attn1.register_forward_hook(lambda *_: runs.append(1))
    wanted = draw(theirs, case)
    pipe = make(case)
    fitted = fit(pipe, {"strategy": "sea-cache", "threshold": threshold} | LIKE_DIFFUSERS)
    assert (draw(pipe, case) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    skipped = kept(fitted).skipped_steps
    assert len(runs) == 2 * (STEPS - len(skipped))
    assert bool(skipped) == (threshold > 0.1)


# the filter


def by_formula(tensor: torch.Tensor, axes: list[int], signal: float, noise: float, exponent: float) -> torch.Tensor:
    """All frequencies of all axes at once, in float64."""
    spectrum = torch.fft.fftn(tensor.double(), dim=axes)
    gain = torch.ones(())
    for axis in axes:
        power = 1 / (torch.fft.fftfreq(tensor.shape[axis]).abs().double() ** exponent + 1e-16)
        shape = [-1 if each == axis else 1 for each in range(tensor.ndim)]
        gain = gain * (signal * power / (signal**2 * power + noise**2)).reshape(shape)
    return torch.fft.ifftn(spectrum * gain / gain.mean(), dim=axes).real


GRIDS = {"StableDiffusion3": (8, 8), "Flux": (8, 8), "CogVideoX": (3, 8, 8), "Wan": (3, 8, 8), "LTX": (3, 16, 16)}


@pytest.mark.parametrize("family", GRIDS)
def test_what_is_compared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the first attention, over their grid, at the scheduler's noise level."""
    case = BY_NAME[family]
    pipe = make(case)
    given: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    tokens, decide = FilteredInput.tokens, SkipCondition.note

    def noting_tokens(self: FilteredInput, tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor.clone())
        return tokens(self, tensor)

    def noting(self: SkipCondition, call: Any, tensor: torch.Tensor | None, *, skipped: bool) -> None:
        if tensor is not None:
            seen.append(tensor.clone())
        decide(self, call, tensor, skipped=skipped)

    monkeypatch.setattr(FilteredInput, "tokens", noting_tokens)
    monkeypatch.setattr(SkipCondition, "note", noting)
    fit(pipe, {"strategy": "sea-cache", "threshold": 0.0})
    draw(pipe, case)
    calls = len(given) // STEPS
    assert len(given) == len(seen) == calls * STEPS
    grid = GRIDS[family]
    for place, (raw, found) in enumerate(zip(given, seen, strict=True)):
        step = place // calls
        if family == "CogVideoX":  # which says its noise by products of alphas
            product = float(pipe.scheduler.alphas_cumprod[int(pipe.scheduler.timesteps[step])])
            level = math.sqrt(product), math.sqrt(1 - product)
        else:
            level = 1 - float(pipe.scheduler.sigmas[step]), float(pipe.scheduler.sigmas[step])
        signal, noise = (max(each, 1e-6) for each in level)
        whole = raw.reshape(len(raw), *grid, -1)
        wanted = by_formula(whole, list(range(1, 1 + len(grid))), signal, noise, len(grid)).reshape(raw.shape)
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("sizes", [(6, 8), (5, 7), (3, 4, 6), (9,)])
def test_noise_decides_what_is_left(sizes: tuple[int, ...]) -> None:
    """Without noise everything is; of noise alone only the mean; between them, less of high frequencies."""
    tensor, axes = torch.randn(2, *sizes, 4, generator=torch.Generator().manual_seed(0)), range(1, 1 + len(sizes))
    clean = filtered(tensor, noise_removing_gain(tensor, axes, NoiseLevel(1.0, 0.0), 2.0), axes)
    assert torch.allclose(clean, tensor, atol=1e-5)
    noisy = filtered(tensor, noise_removing_gain(tensor, axes, NoiseLevel(0.0, 1.0), 2.0), axes)
    mean = tensor.mean(tuple(axes), keepdim=True) * math.prod(sizes)
    assert torch.allclose(noisy, mean.expand_as(noisy), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(2, 6, 8, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    gain = noise_removing_gain(tensor, (1, 2), NoiseLevel(0.5, 0.5), 2.0)
    whole = filtered(tensor, gain, (1, 2))
    sizes: list[int] = []
    work = spectra._filtered
    monkeypatch.setattr(spectra, "_filtered", lambda some, *rest: (sizes.append(some.shape[-1]), work(some, *rest))[1])
    monkeypatch.setattr(spectra, "CHUNK", 2 * 6 * 8 * 3)
    chunked = filtered(tensor, gain, (1, 2))
    assert sizes == [3, 3, 3, 1]
    assert chunked.dtype == dtype
    assert torch.allclose(chunked, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))


# grids of tokens

GIVEN: dict[str, tuple[int, dict[str, Any], int | None, tuple[int, ...] | None]] = {
    "picture": (32, {"sample": torch.zeros(1, 4, 8, 16)}, 4, (4, 8)),
    "clip": (3 * 32, {"hidden_states": torch.zeros(1, 4, 3, 8, 16)}, 4, (3, 4, 8)),
    "frames first": (3 * 32, {"hidden_states": torch.zeros(1, 3, 4, 8, 16)}, 4, (3, 4, 8)),
    "two frames in a token": (2 * 32, {"hidden_states": torch.zeros(1, 4, 3, 8, 16)}, 4, (2, 4, 8)),
    "frames as a batch": (32, {"hidden_states": torch.zeros(1, 4, 3, 8, 16)}, 4, (4, 8)),
    "sizes": (60, {"hidden_states": torch.zeros(1, 60, 8), "num_frames": 3, "height": 4, "width": 5}, None, (3, 4, 5)),
    "shapes": (20, {"hidden_states": torch.zeros(1, 20, 8), "img_shapes": [[(1, 4, 5)]]}, None, (4, 5)),
    "positions": (20, {"x": torch.zeros(1, 20, 8), "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 5)))},
                  None, (4, 5)),
    "sound": (20, {"hidden_states": torch.zeros(1, 8, 20)}, 8, (20,)),
    "joined with text": (48, {"hidden_states": torch.zeros(1, 4, 8, 16)}, 4, None),
    "packed": (20, {"hidden_states": torch.zeros(1, 20, 8)}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_grids_of_tokens(name: str) -> None:
    tokens, given, channels, grid = GIVEN[name]
    assert token_grid(tokens, given, channels) == grid


def test_without_a_grid_no_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["Flux"]
    pipe = make(case)
    wanted = draw(pipe, case)
    monkeypatch.setattr(filtered_input, "token_grid", lambda *_: None)
    fitted = fit(pipe, {"strategy": "sea-cache", "threshold": 9.0})
    assert torch.equal(draw(pipe, case), wanted)
    assert not kept(fitted).skipped_steps
    assert kept(fitted).device_bytes == 0
    assert "no step is skipped, as none of its arguments shows the rows" in str(fitted.report().trace.notes)
    fitted.undo()
    monkeypatch.undo()
    fitted = fit(pipe, {"strategy": "sea-cache", "threshold": 9.0})
    draw(pipe, case)
    assert kept(fitted).skipped_steps == (1, 2, 3, 4, 5, 6)


# noise levels

VARIANCE_PRESERVING: dict[str, Callable[[], Any]] = {
    "DDIM": diffusers.DDIMScheduler, "DDPM": diffusers.DDPMScheduler, "PNDM": diffusers.PNDMScheduler,
    "Euler": diffusers.EulerDiscreteScheduler, "DPM++": diffusers.DPMSolverMultistepScheduler,
    "UniPC": diffusers.UniPCMultistepScheduler, "Heun": diffusers.HeunDiscreteScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
}  # fmt: skip
FLOWS: dict[str, Callable[[], Any]] = {
    "Euler": diffusers.FlowMatchEulerDiscreteScheduler,
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
}


def levels(scheduler: Any, begin: int = 0) -> list[NoiseLevel]:
    """The noise levels of the calls of a pipeline's loop from the timestep `begin` on."""
    scheduler.set_timesteps(6)
    if begin and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    timesteps = scheduler.timesteps[begin:]
    pipe = type("Pipe", (), {"scheduler": scheduler, "_num_timesteps": len(timesteps)})()
    state, found, latents = DenoisingPipeline(lambda: pipe), [], torch.zeros(1, 4, 4, 4)
    for step, timestep in enumerate(timesteps):
        level = state.noise_level(DenoiserCall(step, state.steps(), 0))
        assert level is not None
        found.append(level)
        latents = scheduler.step(torch.zeros_like(latents), timestep, latents).prev_sample
    return found


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("name", VARIANCE_PRESERVING)
def test_noise_levels(name: str, begin: int) -> None:
    scheduler = VARIANCE_PRESERVING[name]()
    found = levels(scheduler, begin)
    for level, timestep in zip(found, scheduler.timesteps[begin:], strict=True):
        assert level.signal**2 + level.noise**2 == pytest.approx(1, abs=1e-5)
        assert level.signal**2 == pytest.approx(float(scheduler.alphas_cumprod[round(float(timestep))]), rel=0.02)


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("name", FLOWS)
def test_noise_levels_of_flows(name: str, begin: int) -> None:
    scheduler = FLOWS[name]()
    found = levels(scheduler, begin)
    for level, timestep in zip(found, scheduler.timesteps[begin:], strict=True):
        assert level.signal + level.noise == pytest.approx(1)
        assert level.noise == pytest.approx(float(timestep) / 1000, abs=2e-3)


def test_no_scheduler_no_level() -> None:
    assert DenoisingPipeline(lambda: torch.nn.Linear(1, 1)).noise_level(DenoiserCall(0, None, 0)) is None


@pytest.mark.parametrize("family", ["StableDiffusion", "Wan", "LTX"])
def test_latents_are_compared(family: str) -> None:
    """Also in U-Nets: skipped by values, the same twice, and near all steps."""
    case = BY_NAME[family]
    pipe = make(case)
    wanted = draw(pipe, case)
    fitted = fit(pipe, {"strategy": "sea-cache", "threshold": 0.6, "filters": "latents"})
    found = draw(pipe, case)
    assert kept(fitted).skipped_steps
    assert torch.equal(found, draw(pipe, case))
    assert 0 < (found - wanted).abs().max() < 0.5 * wanted.abs().max()
    assert denoiser(pipe) in fitted.report().trace.lossy[0]
