"""Exact strips beside diffusers' tiling and slicing, and the classic ladder: peak above weights, time, error.

Autoencoders have random weights. Those of the CPU's table are published ones with a share of their channels, and one,
Stable Diffusion's, in its full size. Everybody decodes the same latents, in turns (A B C A B C …); ratios of times are
medians over the rounds. Bytes are counted and errors taken in a pass of its own before those. An error is the largest
difference from the whole decode in float32, as a share of the largest value there. The ladder: activations_ladder.py.

    python bench/activations.py                       both tables of this computer's device; on two cores < 25 minutes
    python bench/activations.py --only autoencoders   one of them; the other's results stay
    python bench/activations.py --dry                 tiny sizes, to try it out; writes no results
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any

import diffusers
import torch

from activations_ladder import ladder
from measuring import RESULTS, Peak, counting, write
from tightfit import fit
from tightfit.apply.activations.vae_tiling import pixels_per_latent
from tightfit.apply.fitting import Fitted
from tightfit.catalog.known import known_model
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.schema.footprint import FeatureMaps

NOTES = (
    "Weights are random: what a decoder makes of a latent then depends on far more of the picture than in a trained"
    " one, so that ordinary tiling errs more than it would there. Errors of exact strips are rounding in any case.",
    "peak_bytes: on the device, output included, without weights and latents. host_bytes: maps that wait in RAM. On a"
    " CPU the device of the strips is a card played by the CPU: its copies run at the speed of RAM, not of a link.",
)
MB = 10**6
MAPS: tuple[FeatureMaps, ...] = ("device", "host", "recompute")
BATCH = 3  # for slicing
SLOW = 3  # times as long as whole: one round tells enough
WHOLE, TILING, SLICING = "whole", "diffusers tiling", "diffusers slicing"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One autoencoder, of a known model or (without one) a class as it is by default, and what it decodes."""

    name: str
    model: str | None
    latents: tuple[int, ...]  # channels, frames where it has them, rows, columns
    strips: int  # bytes
    tile: int  # side of diffusers' tiles in pixels
    narrow: int = 1  # by how much its channels are fewer than the published one's
    dtype: torch.dtype = torch.float32
    maps: tuple[FeatureMaps, ...] = MAPS[:2]  # with all, the third does ten times the work

    def make(self) -> Any:
        torch.manual_seed(0)
        if self.model is None:
            return getattr(diffusers, self.name)().eval()
        part = known_model(self.model).components["vae"]
        return getattr(diffusers, part.class_name).from_config(narrowed(part.config, self.narrow)).eval()

    def noise(self, batch: int = 1, parts: int = 1) -> torch.Tensor:
        """Latents, of a `parts`th of the rows and of the columns."""
        *others, rows, columns = self.latents
        shape = (batch, *others, rows // parts, columns // parts)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def narrowed(config: dict[str, Any], by: int) -> dict[str, Any]:
    """An autoencoder's configuration with a `by`th of the channels inside."""
    return config | {
        name: value // by if isinstance(value, int) else [width // by for width in value]
        for name, value in config.items()
        if name.endswith(("block_out_channels", "base_dim"))
    }


CPU = (
    Case("AutoencoderKL of Stable Diffusion", "sd-1.5", (4, 96, 96), 50 * MB, 512),
    Case("AutoencoderKLFlux2", "flux.2-dev", (32, 48, 48), 8 * MB, 192, 4, maps=MAPS),
    Case("AutoencoderDC", "sana-1.6b", (32, 16, 16), 8 * MB, 256, 4),
    Case("AutoencoderTiny", None, (4, 64, 64), 8 * MB, 256, maps=MAPS),
    Case("AutoencoderKLQwenImage", "qwen-image", (16, 1, 40, 40), 8 * MB, 160, 4),
    Case("AutoencoderKLWan of 2.1", "wan-2.1-1.3b", (16, 2, 16, 16), 4 * MB, 96, 4),
    Case("AutoencoderKLCogVideoX", "cogvideox-2b", (16, 2, 16, 16), 12 * MB, 96, 4),
    Case("AutoencoderKLHunyuanVideo", "hunyuanvideo", (16, 2, 16, 16), 6 * MB, 96, 4),
    Case("AutoencoderKLLTXVideo", "ltx-video-2b", (128, 2, 12, 12), 8 * MB, 256, 8),
    Case("AutoencoderKLMochi", "mochi-1", (12, 2, 16, 16), 12 * MB, 96, 2),
)
CUDA = (
    Case("AutoencoderKL of SDXL", "sdxl", (4, 256, 256), 256 * MB, 1024, dtype=torch.float16),
    Case("AutoencoderKL of SDXL", "sdxl", (4, 512, 512), 512 * MB, 1024, dtype=torch.float16),
    Case("AutoencoderKLWan of 2.1", "wan-2.1-1.3b", (16, 21, 60, 104), 512 * MB, 256, dtype=torch.bfloat16),
    Case("AutoencoderKLWan of 2.1", "wan-2.1-1.3b", (16, 21, 90, 160), 512 * MB, 256, dtype=torch.bfloat16),
)


def small(case: Case) -> Case:
    """The same in a few hundredths of a second, with tiles that still are several."""
    *others, rows, columns = case.latents
    case = replace(case, narrow=4 if case.model and case.narrow == 1 else case.narrow, dtype=torch.float32)
    strips, side = case.strips * 144 // (rows * columns), 8 * pixels_per_latent(case.make())
    return replace(case, latents=(*others, 12, 12), strips=strips, tile=side)


@dataclass(frozen=True)
class Rival:
    """Who decodes the latents, in its own way, on its own copy of the autoencoder."""

    decode: Callable[[], Any]  # an output with the `sample`
    fitted: Fitted | None = None
    kept: Peak | None = None  # of maps in host memory


def plain(model: Any, latents: torch.Tensor, change: Callable[[Any], None] = lambda _: None) -> Rival:
    own = copy.deepcopy(model).to(latents.device)
    change(own)
    return Rival(lambda: own.decode(latents))


def ours(model: Any, latents: torch.Tensor, **vae: Any) -> Rival:
    """tightfit by a plan of these fields; the host memory that its device takes for maps is counted."""
    own, kept = copy.deepcopy(model), Peak()
    device = choose_device(None if choose_device().separate else "loopback")
    host_room = device.allocate_host

    def counted(size: int) -> torch.Tensor:
        kept.change(size)
        return host_room(size)

    device.allocate_host = counted  # type: ignore[method-assign]
    fitted = fit(own, plan={"vae": vae}, device=device)
    return Rival(lambda: own.decode(latents), fitted, kept)


def tile(model: Any, side: int) -> None:
    """diffusers' tiling with square tiles of `side` pixels; all but AutoencoderTiny overlap them by a quarter."""
    model.enable_tiling()
    sizes = {"sample_min": side, "latent_min": side // pixels_per_latent(model), "sample_stride": side * 3 // 4}
    for name, value in {**sizes, "overlap_factor": 0.25}.items():
        for direction in ("size", "height", "width"):
            if hasattr(model, f"tile_{name}_{direction}"):
                setattr(model, f"tile_{name}_{direction}", value)


def measured(rival: Rival, device: Device) -> tuple[torch.Tensor, Row]:
    """What it decodes, and the bytes that it takes on the device and in host memory."""
    if device.kind == "cuda":
        rival.decode()  # weights come with the first call
    device.release_cache()
    device.reset_peak()
    before = device.allocated_bytes()
    with counting() if before is None and rival.fitted is None else contextlib.nullcontext(Peak()) as peak:
        sample = rival.decode().sample
    row: Row = {"peak_bytes": peak.most if before is None else (device.peak_bytes() or 0) - before}
    if rival.fitted is not None and rival.kept is not None:
        trace = rival.fitted.report().trace
        if before is None:
            row["peak_bytes"] = max(phase.peak_bytes - phase.peak_weights for phase in trace.phases)
        row |= {name: sum(getattr(phase, name) for phase in trace.phases) for name in ("bytes_out", "bytes_in")}
        row |= {"host_bytes": rival.kept.most, "notes": list(trace.notes)}
        rival.fitted.recorder.count_activations = False  # from here on only time counts
    return sample.float().cpu(), row


def compare(rivals: dict[str, Rival], exact: torch.Tensor | None, device: Device, rounds: int) -> list[Row]:
    """Each rival's row; `exact` is what the errors are against (None: what the first, whole, decodes)."""
    rows: dict[str, Row] = {}
    for name, rival in rivals.items():
        rows[name] = {"contender": name, "host_bytes": 0}
        try:
            sample, counted = measured(rival, device)
            exact = sample if exact is None and name == WHOLE else exact
            error = None if exact is None else float((sample - exact).abs().max() / exact.abs().max())
        except Exception as failure:  # a rival that breaks, or does not fit, is a result
            rows[name]["failed"] = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
            continue
        rows[name] |= counted | {"error": error}
        if "peak_bytes" in rows[WHOLE]:
            rows[name]["peak_ratio"] = round(counted["peak_bytes"] / rows[WHOLE]["peak_bytes"], 4)
    for name, times in timed({name: rivals[name] for name in rows if "failed" not in rows[name]}, device, rounds):
        rows[name] |= times
    return list(rows.values())


def timed(rivals: dict[str, Rival], device: Device, rounds: int) -> Iterator[tuple[str, Row]]:
    """Each one's median seconds, and its medians of ratios within a round: to whole, and to diffusers."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds):
        for name, rival in rivals.items():
            if number == 0 or WHOLE not in taken or taken[name][0] < SLOW * taken[WHOLE][0]:
                taken[name].append(device.seconds(rival.decode))
    for name, times in taken.items():
        row: Row = {"seconds": round(statistics.median(times), 3), "rounds": len(times)}
        row["time_ratio"] = ratio(times, taken.get(WHOLE, []))
        row["time_to_diffusers"] = ratio(times, taken.get(TILING) or taken.get(SLICING) or [])
        yield name, row


def ratio(times: list[float], others: list[float]) -> float | None:
    return round(statistics.median(map(truediv, times, others)), 3) if times and others else None


def tiling(case: Case, model: Any, device: Device, rounds: int) -> list[Row]:
    latents, exact, reference = case.noise().to(device.torch_device), None, "whole, float32"
    dtype = str(case.dtype).removeprefix("torch.")
    if case.dtype != torch.float32:
        with contextlib.suppress(torch.OutOfMemoryError):
            exact = plain(model, latents).decode().sample.cpu()
        model, latents = model.to(case.dtype), latents.to(case.dtype)
    rivals = {WHOLE: plain(model, latents), TILING: plain(model, latents, lambda own: tile(own, case.tile))}
    for maps in case.maps:
        rivals[f"tightfit strips, maps {maps}"] = ours(model, latents, strips=case.strips, feature_maps=maps)
    rows = compare(rivals, exact, device, rounds)
    if case.dtype != torch.float32 and exact is None:  # it did not fit
        reference = "not computable" if "failed" in rows[0] else f"whole, {dtype}"
    facts = {"name": case.name, "size": "×".join(map(str, case.latents)), "batch": 1, "dtype": dtype}
    return [facts | {"narrow": case.narrow, "strips": case.strips, "reference": reference} | row for row in rows]


def slicing(case: Case, model: Any, device: Device, rounds: int) -> list[Row]:
    """A batch of pictures a third as high and wide."""
    latents = case.noise(BATCH, 3).to(device.torch_device)
    rivals = {
        WHOLE: plain(model, latents),
        SLICING: plain(model, latents, lambda own: own.enable_slicing()),
        "tightfit slicing": ours(model, latents, slicing=True),
    }
    facts = {"name": case.name, "size": "×".join(map(str, latents.shape[1:])), "batch": BATCH, "dtype": "float32"}
    return [
        facts | {"narrow": case.narrow, "reference": "whole, float32"} | row
        for row in compare(rivals, None, device, rounds)
    ]


def autoencoders(device: Device, rounds: int | None, *, dry: bool) -> list[Row]:
    rows: list[Row] = []
    cases, rounds = CUDA if device.kind == "cuda" else CPU, rounds or 3
    for case in map(small, cases) if dry else cases:
        model = case.make()
        with torch.no_grad():
            found = tiling(case, model, device, rounds)
            if case.dtype == torch.float32:
                found += slicing(case, model, device, rounds)
        print(*map(line_of, found), sep="\n", flush=True)
        rows += found
        device.release_cache()
    return rows


def line_of(row: Row) -> str:
    text = f"{row['name']:34} {row['size']:12} batch {row['batch']}  {row['contender']:28}"
    if "failed" in row:
        return f"{text} {row['failed']}"
    error = "" if row["error"] is None else f"error {row['error']:.1e}"
    text += f" {row['peak_bytes'] / MB:8.1f} MB + {row['host_bytes'] / MB:7.1f} MB of RAM  {row['seconds']:7.2f} s"
    return f"{text}  × {row['time_ratio']}  {error}  {'; '.join(row.get('notes', ()))}".rstrip()


TABLES: dict[str, Callable[..., Any]] = {"autoencoders": autoencoders, "ladder": ladder}


def read_wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Exact strips beside diffusers' tiling, and the classic ladder.")
    parser.add_argument("--only", choices=TABLES, help="one table; the other's results stay")
    parser.add_argument("--rounds", type=int, help="default: 3; on a CPU the ladder has 1")
    parser.add_argument("--dry", action="store_true", help="tiny sizes; writes no results")
    return parser.parse_args()


def main() -> None:
    wishes, device = read_wishes(), choose_device()
    name = "activations-" + re.sub(r"[^a-z0-9]+", "-", (device.product_name() or device.kind).lower())
    file = RESULTS / f"{name}.json"
    facts = json.loads(file.read_text()) if file.exists() else {}
    facts = {"notes": NOTES} | {table: facts[table] for table in facts if table in TABLES}
    for table, make in TABLES.items():
        if wishes.only in (None, table):
            facts[table] = make(device, 1 if wishes.dry else wishes.rounds, dry=wishes.dry)
            if not wishes.dry:
                write(name, facts)


if __name__ == "__main__":
    main()
