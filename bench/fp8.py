"""fp8 storage: bytes, time and pictures, beside diffusers' layerwise casting: the demo's UNet, a 100 M transformer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from measuring import side_by_side, write
from tightfit import fit
from tightfit.checkpoint.loading import load_pipeline
from tightfit.demo.scenes import caption, random_scene
from tightfit.measure.modules import weight_bytes
from tightfit.measure.picture_difference import psnr
from tightfit.run.models import find_model

PROMPTS, STEPS, GUIDANCE = 50, 20, 2.5
FORMS = ("float8_e4m3fn", "float8_e5m2")


def demo_pipeline() -> Any:
    pipe = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, prompts: list[str]) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    batches = []
    for first in range(0, len(prompts), 10):
        part = slice(first, first + 10)
        output = pipe(
            prompts[part],
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            generator=generators[part],
            output_type="pt",
        )
        batches.append(output.images)
    return torch.cat(batches)


def demo() -> dict[str, Any]:
    """The demo's UNet loaded as float16, as it lies on disk; pictures from a float32 pipeline."""
    half = load_pipeline(find_model(None), torch.float16)
    loaded = weight_bytes(half.unet)
    rng = random.Random(0)
    prompts = [caption(random_scene(rng, 1 + index % 2), rng) for index in range(PROMPTS)]
    pipe = demo_pipeline()
    plain = draw(pipe, prompts)
    facts: dict[str, Any] = {"unet_bytes_float16": loaded, "prompts": PROMPTS}
    for form in FORMS:
        fitted = fit(half, plan={"components": {"unet": {"storage": form}}}, device="cpu")
        stored = weight_bytes(half.unet)
        fitted.undo()
        fitted = fit(pipe, plan={"components": {"unet": {"storage": form}}}, device="cpu")
        facts[form] = {
            "unet_bytes": stored,
            "share": round(stored / loaded, 3),
            "psnr": round(psnr(draw(pipe, prompts), plain), 2),
        }
        fitted.undo()
        rival = demo_pipeline()
        rival.unet.enable_layerwise_casting(storage_dtype=getattr(torch, form), compute_dtype=torch.float32)
        facts[f"diffusers {form}"] = {"psnr": round(psnr(draw(rival, prompts), plain), 2)}
    assert torch.equal(draw(pipe, prompts[:10]), plain[:10])  # the same batch: undone exactly
    return facts


def transformer() -> dict[str, Any]:
    """A random Flux transformer of about 100 M parameters in bfloat16."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"attention_head_dim": 64, "num_attention_heads": 8, "joint_attention_dim": 512}
    model = FluxTransformer2DModel(
        num_layers=6, num_single_layers=16, pooled_projection_dim=64, axes_dims_rope=(16, 24, 24), **size
    )
    model = model.to(torch.bfloat16).eval()
    tokens, text = 256, 64
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, text, 512, dtype=torch.bfloat16),
        "pooled_projections": torch.randn(1, 64, dtype=torch.bfloat16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    with torch.no_grad():
        plain = model(**inputs).sample
    loaded = weight_bytes(model)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "bytes_bfloat16": loaded}
    for form in FORMS:
        fitted = fit(model, plan={"components": {"model": {"storage": form}}}, device="cpu")
        stored = weight_bytes(model)
        with torch.no_grad():
            error = float((model(**inputs).sample - plain).norm() / plain.norm())
        times = side_by_side({"stored": lambda: model(**inputs)}, 5)
        fitted.undo()
        times |= side_by_side({"plain": lambda: model(**inputs)}, 5)
        facts[form] = {
            "bytes": stored,
            "share": round(stored / loaded, 3),
            "relative_error": round(error, 4),
            "time_ratio": round(times["stored"] / times["plain"], 2),
        }
    with torch.no_grad():
        assert torch.equal(model(**inputs).sample, plain)
    return facts


if __name__ == "__main__":
    Path(__file__).parent.joinpath("results").mkdir(exist_ok=True)
    write("fp8-transformer", transformer())
    write("fp8-demo", demo())
