"""Trains the demo model from a seed: autoencoder, its decoder again, text encoder, denoiser, the pipeline folder.

    python tools/train_demo.py --work demo-training --out src/tightfit/demo/model

Interrupted, it goes on where it stopped (each stage keeps a checkpoint in --work). Progress goes to the
terminal and, as JSON lines with the score so far, to log.jsonl in --work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from demo_training import autoencoder, denoiser, networks, text


def main(
    work: Annotated[Path, typer.Option(help="Folder for checkpoints and the log.")] = Path("demo-training"),
    out: Annotated[Path, typer.Option(help="Folder for the finished pipeline.")] = Path("src/tightfit/demo/model"),
    seed: int = 0,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    steps: Annotated[int, typer.Option(help="Denoiser steps; may be changed when resuming.")] = 7500,
    scenes: Annotated[int, typer.Option(help="Drawn scenes the denoiser learns from.")] = 16_384,
    score_every: Annotated[int, typer.Option(help="Seconds between scores.")] = 600,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    place = torch.device(device)
    torch.manual_seed(seed)
    tokenizer = networks.make_tokenizer()
    vae, encoder, unet = networks.make_autoencoder(), networks.make_text_encoder(tokenizer), networks.make_denoiser()
    autoencoder.train(vae, work, steps=2000, whole=200, seed=seed, device=place)
    autoencoder.sharpen(vae, work, steps=2000, seed=seed, device=place)
    text.train(encoder, tokenizer, work, steps=300, seed=seed, device=place)
    encoder, unet = denoiser.train(
        vae,
        encoder,
        tokenizer,
        unet,
        work,
        steps=steps,
        scenes=scenes,
        seed=seed,
        device=place,
        score_every=score_every,
    )
    pipe = networks.assemble(vae, encoder, tokenizer, unet).to("cpu", torch.float16)
    pipe.save_pretrained(out, safe_serialization=True)
    print(f"saved to {out}")


if __name__ == "__main__":
    typer.run(main)
