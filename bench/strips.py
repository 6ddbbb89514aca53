"""Full-size autoencoders strip by strip within a card's memory, on the simulated accelerator: peak and time to whole.

Nothing is computed: shapes, the allocator and the clock are real, and the card has no more memory than is said. The
weights are on the card, in the dtype that is said; the latents too.

    python bench/strips.py                        all cases, about 20 minutes on two cores
    python bench/strips.py --only sdxl,wan-2.1    some of them; the others' results stay
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from measuring import RESULTS, write
from tightfit import fit
from tightfit.catalog.known import known_card, known_model
from tightfit.measure.build_models import build_part
from tightfit.schema.footprint import FeatureMaps
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tightfit.units import format_bytes

CARD = "rtx4090"
MB, GB = 10**6, 10**9
ROOM = 2**50
NAME = "strips-simulated"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is decoded: latents of one picture or clip, by channels, frames (clips only), rows and columns."""

    name: str
    model: str
    picture: str
    latents: tuple[int, ...]
    memory: int  # of the card, bytes
    strips: int  # bytes
    maps: FeatureMaps = "device"
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("sdxl", "sdxl", "4096×4096", (4, 512, 512), 2 * GB, 256 * MB, "host"),
    Case("wan-2.1", "wan-2.1-14b", "81 frames 720×1280", (16, 21, 90, 160), 3 * GB, 500 * MB),
    Case("flux.1", "flux.1-dev", "2048×2048", (16, 256, 256), 1 * GB, 128 * MB, "host"),
    Case("flux.2", "flux.2-dev", "2048×2048", (32, 256, 256), 1 * GB, 128 * MB, "host"),
    Case("qwen-image", "qwen-image", "2048×2048", (16, 1, 256, 256), 1 * GB, 128 * MB),
    Case("cogvideox", "cogvideox-5b", "49 frames 480×720", (16, 13, 60, 90), 4 * GB, 500 * MB, "host"),
    Case("hunyuanvideo", "hunyuanvideo", "61 frames 544×960", (16, 16, 68, 120), 4 * GB, 500 * MB, "host"),
    Case("ltx-video", "ltx-video-2b", "121 frames 704×1216", (128, 16, 22, 38), 5 * GB, 500 * MB),
)


def row_of(case: Case) -> Row:
    """What whole execution takes on a roomy card, and strips on one of `case.memory` bytes."""
    whole = decoded(case, ROOM, {})
    strips = decoded(case, case.memory, {"strips": case.strips, "feature_maps": case.maps})
    dtype = str(case.dtype).removeprefix("torch.")
    facts = {"name": case.name, "model": case.model, "picture": case.picture, "dtype": dtype, "card": CARD}
    asked = {"memory": case.memory, "strips": case.strips, "maps": case.maps}
    row: Row = facts | asked | {"whole": whole, "in_strips": strips}
    if "failed" not in strips:
        row["time_ratio"] = round(strips["seconds"] / whole["seconds"], 3)
        row["peak_ratio"] = round(strips["peak"] / whole["peak"], 4)
    return row


def decoded(case: Case, memory: int, vae: dict[str, Any]) -> Row:
    """Peak bytes (weights and output included) and seconds of one decode on a card of `memory` bytes."""
    card = SimulatedCard(0, known_card(CARD).model_copy(update={"bytes": memory}), Host())
    use_cards([card])
    part = build_part("vae", known_model(case.model).components["vae"], case.dtype)
    fitted = fit(part, plan={"vae": vae}, device="simulated:0")
    latents = torch.empty(1, *case.latents, dtype=case.dtype, device="privateuseone:0")
    taken = time.monotonic()
    try:
        with torch.no_grad():
            part.decode(latents)  # weights come, and the method is taken apart
            first = time.monotonic() - taken
            begin = card.now
            part.decode(latents)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        use_cards([])
    trace = fitted.report().trace
    (phase,) = trace.phases
    return {
        "peak": phase.peak_bytes, "weights": phase.peak_weights, "reserved": phase.peak_reserved,
        "seconds": round((card.now - begin) * 1e-9, 4), "bytes_out": phase.bytes_out, "notes": list(trace.notes),
        "first_call_took": round(first, 1),
    }  # fmt: skip


def told(row: Row) -> str:
    head = f"{row['name']:13} {row['picture']:20} {row['dtype']:9} card of {format_bytes(row['memory'])}"
    strips, whole = row["in_strips"], row["whole"]
    if "failed" in strips:
        return f"{head}: {strips['failed']}"
    return (
        f"{head}: peak {format_bytes(strips['peak'])} (reserved {format_bytes(strips['reserved'])}) instead of "
        f"{format_bytes(whole['peak'])}, {strips['seconds']:.3f} s = {row['time_ratio']} x whole; taken apart and run "
        f"in {strips['first_call_took']} s  {'; '.join(strips['notes'])}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--only", default=",".join(case.name for case in CASES))
    only = options.parse_args().only.split(",")
    file = RESULTS / f"{NAME}.json"
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for case in CASES:
        if case.name in only:
            rows[case.name] = row_of(case)
            print(told(rows[case.name]), flush=True)
            write(NAME, {"rows": [rows[other.name] for other in CASES if other.name in rows]})


if __name__ == "__main__":
    main()
