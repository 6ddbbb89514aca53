"""Stage 4: the denoiser and the text encoder together, on latents made once.

v-prediction with zero terminal SNR; one run at a constant rate with a linear fall to zero over the last
fifth, so that `steps` may still be changed while it runs; an exponential average of the weights is kept.
"""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from demo_training import checkpoint
from demo_training.networks import assemble, make_scheduler
from demo_training.scores import score
from tightfit.demo.scenes import caption, draw, random_scene

BATCH = 32
RATE = 6e-4
WARMUP = 300  # steps
SAVE_EVERY = 120  # seconds
ENCODED = 64  # scenes at a time
DROPPED = 0.1  # share of captions left empty, for guidance


@torch.no_grad()
def make_latents(
    autoencoder: AutoencoderKL, count: int, seed: int, device: torch.device, cache: Path
) -> tuple[torch.Tensor, list[str]]:
    """`count` scenes as normalised latents (count, 4, 16, 16) and their captions; 60 % hold two things.

    Encoding takes minutes: what is done is kept in `cache`, and the rest goes on from there.
    """
    rng = random.Random(seed)
    kept = load_file(cache)["latents"] if cache.exists() else torch.empty(0)
    latents, captions = [kept], []
    for first in range(0, count, ENCODED):
        scenes = [random_scene(rng, 2 if rng.random() < 0.6 else 1) for _ in range(ENCODED)]
        pictures = [draw(scene, random.Random(seed + first + row)) for row, scene in enumerate(scenes)]
        captions += [caption(scene, rng) for scene in scenes]
        if first < len(kept):
            continue
        drawn = torch.stack([torch.from_numpy(picture) for picture in pictures]).to(device)
        pixels = drawn.permute(0, 3, 1, 2).float() / 127.5 - 1
        latents.append(autoencoder.encode(pixels).latent_dist.mean)
        if (first // ENCODED) % 16 == 15 or first + ENCODED >= count:
            latents = [torch.cat([part for part in latents if len(part)]).contiguous()]  # as it will be when read
            save_file({"latents": latents[0]}, cache)
            print(f"encoded {len(latents[0])} of {count} scenes", flush=True)
    whole = torch.cat([part for part in latents if len(part)])
    return whole[:count], captions[:count]


def train(
    autoencoder: AutoencoderKL,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    denoiser: UNet2DConditionModel,
    folder: Path,
    *,
    steps: int,
    scenes: int,
    seed: int,
    device: torch.device,
    score_every: int = 600,
) -> tuple[CLIPTextModel, UNet2DConditionModel]:
    """Trains for `steps` steps on `scenes` drawn scenes; returns the averaged text encoder and denoiser."""
    latents, captions = make_latents(autoencoder.to(device), scenes, seed + 1, device, folder / "latents.safetensors")
    empty = tokenizer("", padding="max_length", return_tensors="pt").input_ids
    tokens = tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    noise_levels = make_scheduler().alphas_cumprod.to(device)
    live = {"unet": denoiser.train().to(device), "text": text_encoder.train().to(device)}
    average = {f"average_{name}": copy.deepcopy(module).eval().requires_grad_(False) for name, module in live.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [*denoiser.parameters()], "share": 1.0}, {"params": [*text_encoder.parameters()], "share": 0.25}],
        RATE,
        betas=(0.9, 0.99),
        weight_decay=0.01,
    )
    state = folder / "denoiser-state.safetensors"
    done = checkpoint.load(state, live | average, optimizer)
    started = scored = saved = time.monotonic()
    for step in range(done, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(0, scenes, (BATCH,))
        batch_tokens = torch.where(torch.rand(BATCH, 1) < DROPPED, empty, tokens[rows]).to(device)
        loss = _loss(live, latents[rows], batch_tokens, noise_levels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for module in live.values() for p in module.parameters()], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * group["share"] * _cost_model(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        _follow(average, live, step)
        now, last = time.monotonic(), step + 1 == steps
        if now - saved > SAVE_EVERY or last:
            saved = now
            checkpoint.save(state, live | average, optimizer, step + 1)
        if now - scored > score_every or last or (step + 1) % 250 == 0:
            facts: dict[str, object] = {
                "stage": "denoiser",
                "step": step + 1,
                "of": steps,
                "loss": round(loss.item(), 4),
            }
            if now - scored > score_every or last:
                facts |= score(
                    assemble(autoencoder, average["average_text"], tokenizer, average["average_unet"]), 24, seed=step
                )
                scored = time.monotonic()
            left = (time.monotonic() - started) / (step + 1 - done) * (steps - step - 1)
            checkpoint.note(folder / "log.jsonl", facts | {"left_s": round(left)})
    return average["average_text"], average["average_unet"]


def _cost_model(step: int, steps: int) -> float:
    return min((step + 1) / WARMUP, 1.0, (steps - step) / (0.2 * steps))


def _loss(
    live: dict[str, torch.nn.Module], clean: torch.Tensor, tokens: torch.Tensor, noise_levels: torch.Tensor
) -> torch.Tensor:
    noise = torch.randn(clean.shape).to(clean.device)
    times = torch.randint(0, len(noise_levels), (len(clean),)).to(clean.device)
    level = noise_levels[times].view(-1, 1, 1, 1)
    noisy = level.sqrt() * clean + (1 - level).sqrt() * noise
    velocity = level.sqrt() * noise - (1 - level).sqrt() * clean
    states = live["text"](tokens).last_hidden_state
    return F.mse_loss(live["unet"](noisy, times, states).sample, velocity)


@torch.no_grad()
def _follow(average: dict[str, torch.nn.Module], live: dict[str, torch.nn.Module], step: int) -> None:
    keep = min(0.9995, (step + 1) / (step + 20))
    for name, module in live.items():
        torch._foreach_lerp_([*average[f"average_{name}"].parameters()], [*module.parameters()], 1 - keep)
