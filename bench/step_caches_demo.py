"""Step caches on the demo model: pictures that are right, and PSNR, by the share of multiplications not done.

    python bench/step_caches_demo.py [STRATEGY …]

300 prompts with seeds of their own, those of the demo model's score, one picture a call, 20 steps: without a cache, and
with each strategy that a U-Net of three levels admits, at several settings. One line for each setting in
bench/results/step-caches-demo.jsonl, which is gone on with. Draws docs/images/step-caches-demo.png.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from tightfit import calibrate, fit
from tightfit.checkpoint.loading import load_pipeline
from tightfit.demo.judge import judge
from tightfit.demo.scenes import Scene, random_scene
from tightfit.measure.picture_difference import psnr
from tightfit.run.models import find_model
from tightfit.schema.step_cache import StepCache

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from demo_training.scores import GUIDANCE, STEPS, drawings

ROOT = Path(__file__).parents[1]
SCORE = ROOT / "bench" / "results" / "demo-score.json"
RESULTS = ROOT / "bench" / "results" / "step-caches-demo.jsonl"
PICTURE = ROOT / "docs" / "images" / "step-caches-demo.png"
PROMPTS, BATCH = 300, 15  # as tools/score_demo.py draws them
SETTINGS = [  # but those of magcache, whose magnitudes are measured
    *(f"static,interval={n}" for n in (2, 3, 4, 6)),
    *(f"taylorseer,interval={n},warm_up=2" for n in (2, 3, 4, 6)),
    *(f"meancache,interval={n}" for n in (2, 3, 4, 6)),
    *(f"pab,interval={n},cross_interval={n}" for n in (2, 3, 4, 6)),
    *(f"first-block,threshold={n},warm_up=1,cool_down=1" for n in (0.05, 0.1, 0.2, 0.3)),
    *(f"dual-block,threshold={n},warm_up=1,cool_down=1" for n in (0.1, 0.2, 0.3, 0.5)),
    *(f"easycache,threshold={n},warm_up=2" for n in (0.05, 0.1, 0.2, 0.4)),
    *(f"taylorseer-lite,interval={n},warm_up=2" for n in (2, 3, 4, 6)),
    *(f"faster-cache,interval=2,guidance_interval={n},warm_up=4" for n in (2, 3, 4, 6)),
    *(f"sea-cache,threshold={n},filters=latents" for n in (0.1, 0.2, 0.4, 0.8)),
]
MAGCACHE = (0.03, 0.06, 0.12, 0.24)  # thresholds
OTHERS = ("a small green square at the top", "a yellow triangle in the middle")  # prompts, to measure magnitudes with
NOT_FOR = "teacache and blockdance are for transformers; text-kv changes no picture"


class Asked(NamedTuple):
    """What a picture is drawn from, and what it should show."""

    scene: Scene
    prompt: str
    seed: int


def asked() -> list[Asked]:
    rng, found = random.Random(json.loads(SCORE.read_text())["seed"]), list[Asked]()
    for things in (1, 2):
        scenes = [random_scene(rng, things) for _ in range(PROMPTS // 2)]
        for first in range(0, len(scenes), BATCH):
            batch = scenes[first : first + BATCH]
            wanted = drawings(batch, rng.getrandbits(32))
            found += [Asked(scene, *each) for scene, each in zip(batch, wanted, strict=True)]
    return found


def draw(pipe: Any, each: Asked) -> NDArray[np.float32]:
    output = pipe(
        each.prompt, num_inference_steps=STEPS, guidance_scale=GUIDANCE, output_type="np",
        generator=torch.Generator().manual_seed(each.seed),
    )  # fmt: skip
    picture: NDArray[np.float32] = output.images[0]
    return picture


def flops(pipe: Any, each: Asked) -> int:
    """Twice the multiplications of the denoiser in one call."""
    counter = FlopCounterMode(display=False)
    with counter:
        draw(pipe, each)
    return sum(counter.get_flop_counts()["UNet2DConditionModel"].values())


def is_right(picture: NDArray[np.float32], scene: Scene) -> bool:
    return judge((picture * 255).round().astype(np.uint8), scene).right


def uncached(pipe: Any, wanted: Sequence[Asked]) -> list[NDArray[np.float32]]:
    """The pictures without a cache, kept in the temporary folder between runs."""
    kept = Path(tempfile.gettempdir()) / "tightfit-demo-uncached.npy"
    if not kept.exists():
        np.save(kept, np.stack([draw(pipe, each) for each in wanted]))
    return list(np.load(kept, allow_pickle=False))


def caches(pipe: Any) -> Iterator[StepCache]:
    """All step caches that are tried; `pipe` follows no plan."""
    yield from map(StepCache.of, SETTINGS)
    made = calibrate(pipe, OTHERS, strategies=["magcache"], device="cpu", num_inference_steps=STEPS,
                     guidance_scale=GUIDANCE)  # fmt: skip
    for threshold in MAGCACHE:
        yield made.trials[0].cache.model_copy(update={"threshold": threshold})


def row(pipe: Any, cache: StepCache, wanted: Sequence[Asked], plain: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """What `cache` leaves out, and how right its pictures are."""
    whole = flops(pipe, wanted[0])
    plan = {"components": {"unet": {"cache": cache}}}
    fitted = fit(pipe, plan=plan, device="cpu", count_activations=False)
    right, ratios, skipped, part = list[bool](), list[float](), list[int](), None
    for each, reference in zip(wanted, plain, strict=True):
        picture = draw(pipe, each)
        (seen,) = fitted.report().trace.caches
        count = len(seen.skipped_steps)
        if part is None and count:
            part = whole / STEPS - (whole - flops(pipe, each)) / count  # of a skipped step
        skipped.append(count)
        right.append(is_right(picture, each.scene))
        ratios.append(psnr(*(torch.from_numpy(each).movedim(-1, 0)[None] for each in (picture, reference))))
    fitted.undo()
    left_out = 0.0 if part is None else float(np.mean(skipped)) * (1 - part * STEPS / whole) / STEPS
    finite = [each for each in ratios if each != float("inf")]
    return {
        "settings": cache.brief,
        "left_out": round(left_out, 4),
        "skipped_steps": round(float(np.mean(skipped)), 2),
        "right": "".join("01"[each] for each in right),
        "psnr": round(float(np.mean(finite)), 2) if finite else None,
        "least_psnr": round(min(finite), 2) if finite else None,
    }


def main() -> None:
    pipe = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    wanted = asked()
    known = {each["settings"] for each in map(json.loads, RESULTS.read_text().splitlines())} if RESULTS.exists() else {}
    plain = uncached(pipe, wanted)
    right = [is_right(picture, each.scene) for picture, each in zip(plain, wanted, strict=True)]
    print(f"without a cache {sum(right)} of {len(right)} are right")
    for cache in caches(pipe):
        if cache.brief in known or (sys.argv[1:] and cache.strategy not in sys.argv[1:]):
            continue
        found = row(pipe, cache, wanted, plain)
        found["lost"] = sum(was and now == "0" for was, now in zip(right, found["right"], strict=True))
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print({name: value for name, value in found.items() if name != "right"}, flush=True)
    draw_chart([json.loads(line) for line in RESULTS.read_text().splitlines()], sum(right))


def draw_chart(rows: Sequence[dict[str, Any]], right: int) -> None:
    """Pictures that are not right any more, and mean PSNR, by the share of multiplications not done."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    strategies = dict.fromkeys(each["settings"].partition(",")[0] for each in rows)
    markers = "osD^vP*Xdhp<>"
    for number, strategy in enumerate(strategies):
        some = sorted(
            (each for each in rows if each["settings"].split(",")[0] == strategy), key=lambda each: each["left_out"]
        )
        style = {
            "marker": markers[number % len(markers)],
            "color": f"C{number}" if number < 10 else "black",
            "markersize": 5,
            "linewidth": 1.2,
        }
        shares = [100 * each["left_out"] for each in some]
        above.plot(shares, [each["lost"] for each in some], label=strategy, **style)
        seen = [(share, each["psnr"]) for share, each in zip(shares, some, strict=True) if each["psnr"] is not None]
        below.plot(*zip(*seen, strict=True), **style)
    above.set_ylabel(f"of {right} right pictures, not right with the cache")
    below.set_ylabel("mean PSNR to the pictures without (dB)")
    below.set_xlabel("multiplications of the denoiser not done, over all 20 steps (%)")
    for axes in (above, below):
        axes.axvline(100 / 3, color="0.75", linewidth=1, linestyle="--", zorder=0)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
