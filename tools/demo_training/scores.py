"""Pipeline → how many fresh random prompts come out entirely right."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from tightfit.demo.judge import Verdict, judge
from tightfit.demo.scenes import Scene, caption, random_scene

STEPS, GUIDANCE, BATCH = 20, 2.5, 8


def drawings(scenes: list[Scene], seed: int) -> list[tuple[str, int]]:
    """A prompt and a seed of its own for each scene."""
    rng, wanted = random.Random(seed), list[tuple[str, int]]()
    for first in range(0, len(scenes), BATCH):
        prompts = [caption(scene, rng) for scene in scenes[first : first + BATCH]]
        wanted += [(prompt, rng.getrandbits(48)) for prompt in prompts]
    return wanted


def verdicts(
    pipe: StableDiffusionPipeline,
    scenes: list[Scene],
    *,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Verdict]:
    """One picture a scene, judged; every picture has a seed of its own."""
    pipe.set_progress_bar_config(disable=True)
    wanted, found = drawings(scenes, seed), list[Verdict]()
    for first in range(0, len(scenes), BATCH):
        batch = scenes[first : first + BATCH]
        prompts, seeds = zip(*wanted[first : first + BATCH], strict=True)
        generators = [torch.Generator().manual_seed(each) for each in seeds]
        pictures = pipe(
            list(prompts), num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generators, output_type="np"
        ).images
        found += [judge((p * 255).round().astype(np.uint8), s) for p, s in zip(pictures, batch, strict=True)]
        progress(len(found))
    return found


def score(pipe: StableDiffusionPipeline, count: int, *, seed: int) -> dict[str, object]:
    """Shares entirely right over `count` prompts of one thing and `count` of two, and the share of places right."""
    rng, facts, placed = random.Random(seed), {}, []
    for things, name in ((1, "one_right"), (2, "two_right")):
        judged = verdicts(pipe, [random_scene(rng, things) for _ in range(count)], seed=rng.getrandbits(32))
        facts[name] = round(sum(v.right for v in judged) / count, 3)
        placed += [sorted(t.place for t in v.found) == sorted(t.place for t in v.asked.things) for v in judged]
    return facts | {"places_right": round(sum(placed) / len(placed), 3)}
