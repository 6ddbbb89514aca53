"""A service calls the same pipeline again and again: it neither grows nor slows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from anonymous_memory import anonymous_bytes
from tightfit import fit

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


def test_a_plan_that_is_over_lets_go_of_the_weights() -> None:
    """At once, though references in cycles, which the garbage collector finds much later, still lead to it."""
    network = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    gc.collect()
    gc.disable()
    try:
        for number in range(6):
            fitted = fit(network, plan={"components": {"model": {"placement": "stream"}}}, device="loopback")
            network(torch.ones(1, 1024))
            fitted.undo()
            if not number:
                before = anonymous_bytes(os.getpid())
        assert anonymous_bytes(os.getpid()) < before + 4 * 2**20 < before + network[0].weight.nbytes * 8
    finally:
        gc.enable()


def test_what_stood_for_a_weight_has_its_value_when_the_plan_is_over() -> None:
    network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    fitted = fit(network, plan={"components": {"model": {"placement": "stream"}}}, device="loopback")
    kept: list[nn.Parameter] = []
    hook = network.register_forward_pre_hook(lambda *_: kept.append(network[2].weight))
    network(torch.ones(1, 512))
    hook.remove()
    fitted.undo()
    assert kept[0] is not network[2].weight
    assert torch.equal(kept[0] + 0, network[2].weight)
