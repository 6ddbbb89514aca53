"""Sliced and tiled decoding beside diffusers' own, on the demo's autoencoder: peak above weights, time, error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8 import demo_pipeline
from measuring import counting, side_by_side, write
from tightfit import fit
from tightfit.demo.scenes import draw, parse
from tightfit.measure.picture_difference import psnr

TILE = 256
ROUNDS = 3


def big_picture(side: int) -> torch.Tensor:
    """A scene of 128×128, enlarged to `side` and as pixels in [-1, 1]: flat areas and long edges, where tiles show."""
    scene = parse("a large red circle on the left and a large blue square on the right on a pink background")
    assert scene is not None
    pixels = torch.from_numpy(draw(scene)).permute(2, 0, 1)[None].float() / 127.5 - 1
    return torch.nn.functional.interpolate(pixels, size=(side, side), mode="bilinear")


def compare(latents: torch.Tensor, rivals: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    times = side_by_side(rivals, ROUNDS)
    with torch.no_grad():
        whole = rivals["whole"]().sample
    facts = {}
    for name, call in rivals.items():
        with counting() as peak:
            sample = call().sample
        facts[name] = {
            "peak_bytes": peak.most,
            "time_ratio": round(times[name] / times["whole"], 2),
            "psnr": round(psnr(sample / 2, whole / 2), 1) if not torch.equal(sample, whole) else None,
        }
    return {"latents": list(latents.shape), **facts}


def main() -> None:
    plain, ours, theirs = (demo_pipeline().vae for _ in range(3))
    with torch.no_grad():
        latents = plain.encode(big_picture(1024)).latent_dist.mean
    fit(ours, plan={"vae": {"tile": TILE}}, device="cpu")
    theirs.enable_tiling()
    theirs.tile_sample_min_size, theirs.tile_latent_min_size = TILE, TILE // 8
    tiling = compare(
        latents,
        {
            "whole": lambda: plain.decode(latents),
            "tightfit tiles": lambda: ours.decode(latents),
            "diffusers tiles": lambda: theirs.decode(latents),
        },
    )
    theirs.disable_tiling()
    theirs.enable_slicing()
    fit(ours, plan={"vae": {"slicing": True}}, device="cpu")
    batch = latents[:, :, :32, :32].repeat(8, 1, 1, 1)
    slicing = compare(
        batch,
        {
            "whole": lambda: plain.decode(batch),
            "tightfit slices": lambda: ours.decode(batch),
            "diffusers slices": lambda: theirs.decode(batch),
        },
    )
    write("vae", {"tile": TILE, "tiling": tiling, "slicing": slicing})


if __name__ == "__main__":
    main()
