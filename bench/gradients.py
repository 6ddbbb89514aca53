"""Training a LoRA of rank 4 on the demo model's denoiser: peaks of memory and losses, without and with a plan.

The device is `loopback`, whose memory is counted tensor by tensor: copies of weights, activations, gradients and
optimizer states. Without a plan, the weights themselves count as well.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from peft import LoraConfig

from fp8 import demo_pipeline
from measuring import write
from tightfit import fit
from tightfit.measure.meter import TensorMeter
from tightfit.measure.modules import weight_bytes

BATCH, STEPS, RANK = 16, 100, 4
PLANS: dict[str, dict[str, Any]] = {
    "stream": {"placement": "stream", "weight_memory": "3MB"},
    "stream, no checkpointing": {"placement": "stream", "weight_memory": "3MB", "gradient_checkpointing": False},
    "resident, checkpointing": {"placement": "resident", "gradient_checkpointing": True},
}


def train(network: Any, weights: int) -> dict[str, Any]:
    """Train for STEPS steps; return losses, the peak in bytes above what is in host memory, and seconds."""
    config, held, peak = network.config, weights, 0

    def changed(difference: int) -> None:
        nonlocal held, peak
        held += difference
        peak = max(peak, held)

    shape = (BATCH, config.in_channels, config.sample_size, config.sample_size)
    generator = torch.Generator().manual_seed(0)
    latents, targets = (torch.randn(shape, generator=generator) for _ in range(2))
    prompts = torch.randn(BATCH, 77, config.cross_attention_dim, generator=generator)
    optimizer = torch.optim.AdamW([each for each in network.parameters() if each.requires_grad], lr=1e-3)
    losses, started = [], time.perf_counter()
    with TensorMeter(changed):
        for step in range(STEPS):
            loss = (network(latents, step, encoder_hidden_states=prompts).sample - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
    return {"losses": losses, "peak": peak, "seconds": time.perf_counter() - started}


def with_lora(network: Any) -> Any:
    torch.manual_seed(0)
    network.requires_grad_(False)
    network.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return network


def main() -> None:
    denoiser = with_lora(demo_pipeline().unet)
    weights = weight_bytes(denoiser)
    untouched = train(copy.deepcopy(denoiser), weights)
    rows = [{"plan": "none", "peak": untouched["peak"], "seconds": untouched["seconds"]}]
    for name, plan in PLANS.items():
        network = copy.deepcopy(denoiser)
        fitted = fit(network, plan={"components": {"model": plan}}, device="loopback", count_activations=False)
        there = 0 if plan["placement"] == "stream" else weights
        found = train(network, there)
        fitted.undo()
        assert found["losses"] == untouched["losses"], name
        rows.append({"plan": name, "peak": found["peak"], "seconds": found["seconds"]})
    write("gradients", {"weights": weights, "batch": BATCH, "steps": STEPS, "rank": RANK, "rows": rows})
    for row in rows:
        print(
            f"{row['plan']:<28}{row['peak'] / 1e6:8.1f} MB {row['peak'] / rows[0]['peak']:6.2f} {row['seconds']:6.1f} s"
        )


if __name__ == "__main__":
    main()
