"""A seed → a command and a model folder: right by construction in a third of the cases, else spoilt in one place."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

__all__ = ["Input", "make_input"]

SIZE = ("--height", "64", "--width", "64", "--steps", "1", "--seed", "1")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 7, 1.5, -0.5, 1e-30, 1e30, 10**4, 10**6, 10**9, 10**18, 10**40, "", "x", "float16",
    "x" * 3000, "\ud800", [], [0], [-1, 10**9], ["x"], {}, {"a": 1}, [[[]]],
)  # fmt: skip
WORDS = ("", "x", "-1", "0", "1e9", "nan", "8GB", "1B", "150MB", "cpu", "cuda:9", "fp8", "./x", "~x", "=", "a=b",
         "9" * 400, "lora:2", "vae.tile=64", "components.unet.placement=stream", "{", "\udcff", "../a.png")  # fmt: skip
OPTIONS = ("--budget", "--ram", "--allow", "--level", "--plan", "--set", "--height", "--width", "--frames", "--steps",
           "--guidance", "--seed", "--batch", "--negative-prompt", "--device", "--dtype", "--out", "--timeline",
           "--snapshot", "--backward")  # fmt: skip
RIGHT: tuple[tuple[str, ...], ...] = (
    (), ("--level", "0"), ("--level", "1"), ("--level", "2"), ("--level", "3"), ("--budget", "200MB"),
    ("--budget", "150MB"), ("--set", "components.unet.placement=stream"), ("--set", "components.unet.offload_to=disk"),
    ("--set", "components.vae.placement=offload"), ("--plan", "right.yaml"), ("--timeline", "memory.svg"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Input:
    words: tuple[str, ...]
    right: bool  # must succeed, with the picture that the untouched pipeline draws
    what: str  # was done


def make_input(seed: int, model: Path, folder: Path) -> Input:
    """Make the input of `seed` in the empty `folder`, from the sound `model`."""
    draw = random.Random(seed)
    shutil.copytree(model, folder / "model")
    (folder / "right.yaml").write_text("level: 2\nvae: {slicing: true}\n")
    kind = draw.choice(("right", "right", "configuration", "file", "options", "plan"))
    device = draw.choice(("cpu", "loopback"))
    words = ("run", "model", "a fox", *SIZE, "--device", device, "--out", "a.png")
    if kind == "right":
        extra = draw.choice(RIGHT)
        extra = () if device == "cpu" and "--budget" in extra else extra  # which counts all of the process there
        return Input((*words, *extra), True, f"right: {' '.join(extra)}")
    if draw.random() < 0.3:
        words = ("plan", "model", "--card", "rtx3060", "--level", draw.choice("0123"), *SIZE[:6])
    if kind == "options":
        option, value = draw.choice(OPTIONS), draw.choice(WORDS)
        return Input((*words, option, value), False, f"{option} {value[:40]!a}")
    if kind == "plan":
        plan, what = _odd_plan(draw)
        (folder / "plan.json").write_text(plan, errors="surrogatepass")
        return Input((*words, "--plan", "plan.json"), False, what)
    what = _spoil_configuration(draw, folder / "model") if kind == "configuration" else _spoil(draw, folder / "model")
    return Input(words, False, what)


def _odd_plan(draw: random.Random) -> tuple[str, str]:
    field = draw.choice(
        (
            "level",
            "vae",
            "components",
            "device",
            "budget",
            "request",
            "forecast",
            "reasons",
            "x",
            "vae.tile",
            "vae.strips",
            "vae.feature_maps",
            "components.unet",
            "components.unet.storage",
            "components.unet.weight_memory",
            "components.x",
            "request.height",
            "request.arguments",
        )
    )
    value: Any = draw.choice(ODD)
    what = f"plan {field} = {value!a:.60}"
    for name in reversed(field.split(".")):
        value = {name: value}
    text = json.dumps(value)
    return (text[: draw.randrange(len(text))], f"{what}, cut") if draw.random() < 0.1 else (text, what)


def _spoil_configuration(draw: random.Random, model: Path) -> str:
    file = draw.choice(sorted(model.rglob("*.json")))
    config = json.loads(file.read_text())
    field, value = draw.choice(sorted(config)), draw.choice((..., *ODD))
    config |= {field: value}
    file.write_text(json.dumps({name: each for name, each in config.items() if each is not ...}))
    return f"{file.parent.name}/{file.name} {field} = {value!a:.60}"


def _spoil(draw: random.Random, model: Path) -> str:
    file = draw.choice(sorted(path for path in model.rglob("*") if path.is_file()))
    data, how = file.read_bytes(), draw.choice(("gone", "folder", "pipe", "loop", "cut", "bytes", "empty", "longer"))
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "loop":
        file.symlink_to(file.name)
    elif how != "gone":
        changed = bytearray(data)
        header = 8 + struct.unpack("<Q", data[:8])[0] if file.suffix == ".safetensors" else len(data)
        for _ in range(draw.randint(1, 4) if how == "bytes" else 0):
            changed[draw.randrange(header)] = draw.randrange(256)
        size = {"cut": draw.randrange(len(data)), "empty": 0}.get(how, len(data))
        file.write_bytes(bytes(changed[:size]) + (b"more" if how == "longer" else b""))
    return f"{file.parent.name}/{file.name}: {how}"
