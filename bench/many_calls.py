"""1,000 calls of one process within a budget, of 20 sizes, then 50 new sizes: is memory flat, are pictures right?

The demo model, within RAM on the CPU, or on `loopback`, whose memory is this process's heap. Anonymous memory, open
files and threads are read after each call.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import numpy as np
import torch

from fp8 import demo_pipeline
from measuring import write
from tightfit import fit
from tightfit.devices.ram import held_bytes

LIMITS: dict[str, dict[str, str]] = {"cpu": {"ram": "900MB"}, "loopback": {"budget": "100MB"}}  # by device
CALLS, SIZES, NEW = 1000, 20, 50
SETTLED = 200  # calls after which memory should be flat
SIDES = [64 + 8 * index for index in range(17)]


def state() -> tuple[int, int, int]:
    return held_bytes(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def draw(pipe: Any, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    height, width = size
    generator = torch.Generator().manual_seed(height * 1000 + width)
    found = pipe("a red circle", height=height, width=width, num_inference_steps=2, generator=generator)
    return np.asarray(found.images[0])


def summary(states: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Trend and maxima of the settled calls, relative to their mean; changes of files and threads."""
    memory = np.array([each[0] for each in states[SETTLED:]], dtype=float)
    slope = np.polyfit(np.arange(len(memory)), memory, 1)[0]
    before = max(each[0] for each in states[:SETTLED])
    return {
        "mean": int(memory.mean()),
        "trend": slope * len(memory) / memory.mean(),
        "new maximum": memory.max() / before - 1,
        "files": [min(each[1] for each in states), max(each[1] for each in states)],
        "threads": [min(each[2] for each in states), max(each[2] for each in states)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--device", choices=list(LIMITS), default="cpu")
    options = parser.parse_args()
    choice = random.Random(0)
    every = [(height, width) for height in SIDES for width in SIDES]
    chosen = choice.sample(every, SIZES + options.new)
    sizes, new = chosen[:SIZES], chosen[SIZES:]
    plain = demo_pipeline()
    expected = {size: draw(plain, size) for size in chosen}
    pipe = demo_pipeline()
    fitted = fit(pipe, device=options.device, **LIMITS[options.device])
    began, different, states, grown = time.monotonic(), 0, list[tuple[int, int, int]](), list[int]()
    for size in sizes:
        different += not same(draw(pipe, size), expected[size])
    for number in range(options.calls):
        size = choice.choice(sizes)
        different += not same(draw(pipe, size), expected[size])
        states.append(state())
        if number % 100 == 99:
            print(f"{number + 1} calls, {time.monotonic() - began:.0f} s, {states[-1]}", flush=True)
    found = summary(states)
    for size in new:
        before = held_bytes()
        different += not same(draw(pipe, size), expected[size])
        grown.append(held_bytes() - before)
    found |= {"different": different, "calls": len(states), "new sizes": len(grown), "growth": grown}
    fitted.undo()
    write(f"many-calls-{options.device}", found)
    print({name: value for name, value in found.items() if name != "growth"}, f"{np.mean(grown):,.0f} bytes a new size")


def same(picture: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Whether two pictures differ by no more than rounding to 8 bits."""
    return int(np.abs(picture.astype(int) - expected).max()) <= 1


if __name__ == "__main__":
    main()
