"""A service calls the same pipeline again and again: it neither grows nor slows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, sys, time
import psutil, torch
from tiny_pipelines import CASES, run
from tightfit import fit
torch.set_num_threads(1)
case = next(case for case in CASES if case.name == "StableDiffusion")
pipe = case.make()
fit(pipe, level=int(sys.argv[1]), device="loopback")
rss, seconds = [], []
for call in range(50):
    started = time.process_time()
    run(pipe, case)
    seconds.append(time.process_time() - started)
    gc.collect()
    rss.append(psutil.Process().memory_info().rss)
hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pipe.unet.modules())
print(rss[9], rss[49], min(seconds[5:15]), min(seconds[40:]), hooks)
"""


@pytest.mark.slow
def test_fifty_calls_neither_grow_nor_slow() -> None:
    tests = Path(__file__).parent.parent
    for level in ("0", "3"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, level], cwd=tests, capture_output=True, text=True, check=True, timeout=600
        )
        tenth, fiftieth, early, late, _ = map(float, done.stdout.split())
        assert fiftieth <= 1.02 * tenth
        assert late <= 1.5 * early  # processor time of the best call of ten: noise is far below
