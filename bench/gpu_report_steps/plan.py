"""The steps in order of worth, as data. Imports nothing heavy: the program reads it before any step runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAPS", "CONTENDERS", "LIMIT", "Step", "steps"]

LIMIT = 480  # seconds of a step at most
MODELS = ("sd-1.5", "sdxl", "flux.1-dev", "qwen-image", "cogvideox-5b", "wan-2.1-14b")
CAPPED = MODELS[1:]  # sd-1.5 fits under every cap
CAPS = (12, 8, 6, 16, 24)  # GB
CONTENDERS = (
    "diffusers: models",
    "diffusers: leaves",
    "diffusers: blocks",
    "diffusers: sequential",
    "diffusers-mm",
)  # of bench/rivals_contenders.py; leaves and blocks: group offload with a stream


@dataclass(frozen=True)
class Step:
    """Something that is measured in a process of its own, which is ended after `limit` seconds."""

    name: str
    measures: str
    file: str  # in the folder of results
    run: str  # "module:function" of this package
    model: str = ""
    caps: tuple[int, ...] = ()
    limit: int = LIMIT
    values: bool = False  # whether its numbers matter: on the stub all of them are computed then


def steps(*, dry: bool = False) -> list[Step]:
    """All steps; `dry`: each kind once, with one model and one cap, for the stub's card."""
    models, capped, caps = (("sd-1.5",), ("sd-1.5",), (2,)) if dry else (MODELS, CAPPED, CAPS)
    compiled = models[0] if dry else "flux.1-dev"
    return [
        Step("versions", "driver, libraries, card and host", "card.json", "card:versions"),
        Step("tests", "tests/gpu, without those marked full", "tests.json", "suite:gpu_tests", values=True),
        Step("rates", "link, launch and arithmetic rates, and the catalog's", "card.json", "card:rates"),
        *(
            Step(f"peaks {name}", "a whole call: bytes and seconds of each phase", "peaks.json", "calls:peaks", name)
            for name in models
        ),
        Step("clock", "seconds of kernels as diffusion models call them", "card.json", "card:clock"),
        Step("allocator", "a recorded history, replayed by the simulated allocator", "card.json", "allocator:replayed"),
        *(
            Step(f"caps {name}", "a call within each cap", "caps.json", "caps:own", name, caps)
            for name in capped
        ),
        Step("20 calls", "the same call 20 times within a budget", "steady.json", "calls:in_a_row", capped[0]),
        Step("ballast", "calls while another process takes more", "steady.json", "steady:ballast", values=True),
        Step("sanitizer", "torch's race detector on a tiny FLUX", "steady.json", "steady:sanitizer", values=True),
        Step("compiled blocks", "a tiny FLUX, streamed, compiled", "steady.json", "steady:compiled", values=True),
        Step("speed of compiled blocks", "a call with and without them", "steady.json", "calls:compiled", compiled),
        *(
            Step(f"rivals {name}", "others' calls within each cap", "rivals.json", "caps:rivals", name, caps)
            for name in capped
        ),
    ]  # fmt: skip
