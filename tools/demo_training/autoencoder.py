"""Stage 1: the autoencoder, on crops first (most of a scene is flat), then on whole pictures.

Stage 2 is its decoder alone: small shapes come out too round, and what a denoiser makes is never quite what
an encoder makes. The encoder stays, and with it all latents.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch.nn import functional as F

from demo_training import checkpoint
from tightfit.demo.scenes import SIDE, draw, random_scene

RATE = 1e-3
CROP, CROP_BATCH, WHOLE_BATCH = 64, 16, 4
KL_WEIGHT = 1e-6  # 1e-4 half-collapsed a latent channel in a trial
DECODER_RATE = 5e-4
BLUR = 0.2  # most noise added to a latent of deviation 1 while the decoder learns alone
CORNERED = ("triangle", "diamond")  # small ones were drawn too round


def pictures(seed: int, count: int) -> torch.Tensor:
    """`count` scenes, float32 of shape (count, 3, 128, 128) in [-1, 1]; half of them hold two things."""
    rng = random.Random(seed)
    drawn = np.stack([draw(random_scene(rng, 1 + index % 2), rng) for index in range(count)])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(autoencoder: AutoencoderKL, folder: Path, *, steps: int, whole: int, seed: int, device: torch.device) -> None:
    """Trains for `steps` steps, the last `whole` of them on whole pictures, then normalises the latents."""
    finished = folder / "autoencoder.safetensors"
    if checkpoint.load_module(finished, autoencoder):
        return
    autoencoder.train().to(device)
    optimizer = torch.optim.AdamW(autoencoder.parameters(), RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.05)
    state = folder / "autoencoder-state.safetensors"
    done = checkpoint.load(state, {"autoencoder": autoencoder}, optimizer)
    schedule.last_epoch = done
    started = time.monotonic()
    for step in range(done, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        batch = _batch(seed * 1_000_003 + step, step >= steps - whole).to(device)
        posterior = autoencoder.encode(batch).latent_dist
        rebuilt = autoencoder.decode(posterior.sample()).sample
        loss = _distance(rebuilt, batch) + KL_WEIGHT * posterior.kl().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            left = (time.monotonic() - started) / (step + 1 - done) * (steps - step - 1)
            facts = {"stage": "autoencoder", "step": step + 1, "of": steps, "loss": round(loss.item(), 5)}
            checkpoint.note(
                folder / "log.jsonl", facts | {"psnr": round(_psnr(autoencoder, device), 2), "left_s": round(left)}
            )
            checkpoint.save(state, {"autoencoder": autoencoder}, optimizer, step + 1)
    _normalise(autoencoder.eval(), device)
    checkpoint.save_module(finished, autoencoder)


def sharpen(autoencoder: AutoencoderKL, folder: Path, *, steps: int, seed: int, device: torch.device) -> None:
    """Trains the decoder alone for `steps` steps, on slightly noisy latents; what the encoder makes stays the same."""
    finished = folder / "sharpened.safetensors"
    if checkpoint.load_module(finished, autoencoder):
        return
    autoencoder.eval().requires_grad_(False).to(device)
    decoder = torch.nn.ModuleList([autoencoder.post_quant_conv, autoencoder.decoder]).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(decoder.parameters(), DECODER_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, DECODER_RATE, steps, pct_start=0.05)
    state = folder / "sharpened-state.safetensors"
    done = checkpoint.load(state, {"autoencoder": autoencoder}, optimizer)
    schedule.last_epoch = done
    started = time.monotonic()
    for step in range(done, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        batch = _hard_batch(seed * 1_000_003 + step).to(device)
        latents = autoencoder.encode(batch).latent_dist.mean
        noise = BLUR * torch.rand(len(latents), 1, 1, 1) * torch.randn(latents.shape)
        loss = _distance(autoencoder.decode(latents + noise.to(device)).sample, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            left = (time.monotonic() - started) / (step + 1 - done) * (steps - step - 1)
            facts = {"stage": "decoder", "step": step + 1, "of": steps, "loss": round(loss.item(), 5)}
            checkpoint.note(
                folder / "log.jsonl", facts | {"psnr": round(_psnr(autoencoder, device), 2), "left_s": round(left)}
            )
            checkpoint.save(state, {"autoencoder": autoencoder}, optimizer, step + 1)
    checkpoint.save_module(finished, autoencoder)


def _hard_batch(seed: int) -> torch.Tensor:
    """Crops of which half hold a small thing with corners."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < CROP_BATCH:
        scene = random_scene(rng, 1 + len(drawn) % 2)
        hard = any(thing.size == "small" and thing.shape in CORNERED for thing in scene.things)
        if hard or len(drawn) >= CROP_BATCH // 2:
            drawn.append(torch.from_numpy(draw(scene, rng)).permute(2, 0, 1).float() / 127.5 - 1)
    return torch.stack([_crop(picture, rng) for picture in drawn])


def _batch(seed: int, whole: bool) -> torch.Tensor:
    if whole:
        return pictures(seed, WHOLE_BATCH)
    rng = random.Random(seed)
    return torch.stack([_crop(picture, rng) for picture in pictures(seed, CROP_BATCH)])


def _crop(picture: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A crop of `picture` that is not flat, if three tries find one."""
    for _ in range(3):
        x, y = rng.randrange(SIDE - CROP + 1), rng.randrange(SIDE - CROP + 1)
        crop = picture[:, y : y + CROP, x : x + CROP]
        if crop.amax((1, 2)).ne(crop.amin((1, 2))).any():
            break
    return crop


def _distance(rebuilt: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Squared and absolute error, four times as important on things as on their background, ten times on outlines.

    Outlines tell a small diamond from a small circle, and are a percent of the pixels.
    """
    background = drawn.flatten(2).median(-1).values[..., None, None]
    thing = (drawn - background).abs().amax(1, keepdim=True) > 0.1
    outline = (F.max_pool2d(drawn, 5, 1, 2) + F.max_pool2d(-drawn, 5, 1, 2)).amax(1, keepdim=True) > 0.1
    weight = 1 + 3 * thing + 6 * outline
    error = rebuilt - drawn
    return (weight * error.square()).mean() + 0.2 * (weight * error.abs()).mean()


@torch.no_grad()
def _psnr(autoencoder: AutoencoderKL, device: torch.device) -> float:
    batch = pictures(7, 16).to(device)
    rebuilt = autoencoder.decode(autoencoder.encode(batch).latent_dist.mean).sample.clamp(-1, 1)
    return float(10 * torch.log10(4 / F.mse_loss(rebuilt, batch)))


@torch.no_grad()
def _normalise(autoencoder: AutoencoderKL, device: torch.device) -> None:
    """Folds each latent channel's mean and deviation into the 1×1 convolutions around the latent."""
    means = torch.cat([autoencoder.encode(pictures(100 + i, 32).to(device)).latent_dist.mean for i in range(16)])
    mean, deviation = means.mean((0, 2, 3)), means.std((0, 2, 3))
    channels = mean.numel()
    into, out = autoencoder.quant_conv, autoencoder.post_quant_conv
    out.bias += out.weight[:, :, 0, 0] @ mean
    out.weight *= deviation[None, :, None, None]
    into.weight[:channels] /= deviation[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean) / deviation
    into.bias[channels:] -= 2 * deviation.log()
