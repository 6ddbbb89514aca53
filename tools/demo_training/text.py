"""Stage 3: the text encoder alone learns to bind, before any picture is seen.

Four linear heads must read size, colour, shape and place of a thing off the last token of its place
words, a fifth the background off the end token. With that in the hidden states the denoiser only has to
look. (Left to the denoiser's loss, which thing comes first stayed at chance for 250,000 samples.)
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from demo_training import checkpoint
from demo_training.networks import TEXT_WIDTH
from tightfit.demo.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZES, Scene, caption, random_scene

BATCH = 128
CHOICES = {"size": list(SIZES), "colour": list(COLOURS), "shape": list(SHAPES), "place": list(PLACES)}


def train(
    text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, folder: Path, *, steps: int, seed: int, device: torch.device
) -> None:
    finished = folder / "text.safetensors"
    if checkpoint.load_module(finished, text_encoder):
        return
    text_encoder.train().to(device)
    torch.manual_seed(seed)
    heads = torch.nn.ModuleDict({name: torch.nn.Linear(TEXT_WIDTH, len(words)) for name, words in CHOICES.items()})
    heads["background"] = torch.nn.Linear(TEXT_WIDTH, len(BACKGROUNDS))
    heads.to(device)
    optimizer = torch.optim.AdamW([*text_encoder.parameters(), *heads.parameters()], 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(steps):
        rng = random.Random(seed * 1_000_003 + step)
        scenes = [random_scene(rng, rng.choice((1, 2))) for _ in range(BATCH)]
        loss, right = _loss(text_encoder, heads, tokenizer, scenes, rng, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            left = (time.monotonic() - started) / (step + 1) * (steps - step - 1)
            facts = {"stage": "text", "step": step + 1, "of": steps, "loss": round(loss.item(), 5)}
            checkpoint.note(folder / "log.jsonl", facts | {"right": right, "left_s": round(left)})
    checkpoint.save_module(finished, text_encoder.eval())


def _loss(
    text_encoder: CLIPTextModel,
    heads: torch.nn.ModuleDict,
    tokenizer: CLIPTokenizer,
    scenes: list[Scene],
    rng: random.Random,
    device: torch.device,
) -> tuple[torch.Tensor, float]:
    captions = [caption(scene, rng) for scene in scenes]
    tokens = tokenizer(captions, padding="max_length", return_tensors="pt").input_ids.to(device)
    states = text_encoder(tokens).last_hidden_state
    owners, ends = [], []
    for row, scene in enumerate(scenes):
        position = 0
        for thing in scene.things:
            position += len(str(thing).split())
            owners.append((row, position, thing))  # the start token shifts every word by one
            position += 1  # "and"
        ends.append(len(captions[row].split()) + 1)
    seen = states[[row for row, _, _ in owners], [position for _, position, _ in owners]]
    ended = states[range(len(scenes)), ends]
    targets = {n: [words.index(getattr(t, n)) for _, _, t in owners] for n, words in CHOICES.items()}
    answers = [(heads[name](seen), torch.tensor(target, device=device)) for name, target in targets.items()]
    backgrounds = [list(BACKGROUNDS).index(scene.background) for scene in scenes]
    answers.append((heads["background"](ended), torch.tensor(backgrounds, device=device)))
    loss = torch.stack([F.cross_entropy(logits, target) for logits, target in answers]).sum()
    right = min(float((logits.argmax(-1) == target).float().mean()) for logits, target in answers)
    return loss, round(right, 3)
