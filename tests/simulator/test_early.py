"""What works next comes while the one before finishes: into the memory that this one gives up, and no more."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from a_few import a_few
from more_pipelines import MORE_CASES
from simulator.conftest import MakeCards
from tightfit import fit
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.weight_groups import weight_groups_of
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.modules import find_components, inspect_component
from tightfit.measure.recorder import Recorder
from tightfit.schema.results import Trace
from tightfit.simulator.storage import free_dead_tensors
from tiny_pipelines import CASES, TinyCase, run


def traces_of(pipe: Any, case: TinyCase, plan: dict[str, Any], device: str, wanted: torch.Tensor) -> list[Trace]:
    fitted = fit(pipe, plan={"components": plan}, device=device)
    traces = []
    for _ in range(3):
        assert torch.equal(run(pipe, case).cpu(), wanted)
        traces.append(fitted.report().trace)
    fitted.undo()
    return traces


@pytest.mark.parametrize("name", a_few(["StableDiffusion", "Flux", "StableDiffusionControlNet"], "Flux"))
@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_the_next_comes_early_and_the_peaks_stay(
    name: str, placement: str, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 8192)
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe = case.make()
    wanted = run(pipe, case)
    make_cards()
    plan = {part: {"placement": placement} for part in find_components(pipe)}
    first, *later = traces_of(pipe, case, plan, "simulated:0", wanted)
    for trace in later:
        assert trace.notes == ()
        assert [phase.name for phase in trace.phases] == [phase.name for phase in first.phases]
        assert trace.phases[-1].bytes_in < first.phases[-1].bytes_in
        assert trace.peak_bytes <= first.peak_bytes


def test_no_more_comes_early_than_the_plan_says(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 8192)
    case = next(case for case in CASES if case.name == "StableDiffusion")
    pipe = case.make()
    make_cards()
    parts = {part: {"placement": "offload"} for part in find_components(pipe)}
    late: dict[int | None, int] = {}
    for limit in (None, 50_000, 0):
        order = [{"component": "vae", "method": "decode", "prefetch": limit}]
        fitted = fit(pipe, plan={"components": parts, "schedule": order}, device="simulated:0")
        run(pipe, case)
        unknowing = fitted.report().trace.phases[-1].bytes_in  # nobody knows who is next
        run(pipe, case)
        late[limit] = fitted.report().trace.phases[-1].bytes_in
        fitted.undo()
    assert late[0] == pytest.approx(unknowing, abs=512)
    assert 0 < late[0] - late[50_000] <= 50_000 < late[0] - late[None]


def test_what_is_given_up_is_free_when_that_is_told(make_cards: MakeCards) -> None:
    """Who is told takes as much at once: both would be there otherwise."""
    (card,) = make_cards()
    device = SimulatedDevice(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    groups = weight_groups_of(
        network, inspect_component("n", network), "layer",
        lambda masters: HostStore(list(masters), device), lambda master: master,
    )  # fmt: skip
    recorder = Recorder(device, count_activations=False)
    streamer = Streamer(groups, [group.name for group in groups], 0, device, recorder)
    told: list[tuple[int, int]] = []

    def bytes_there() -> int:
        free_dead_tensors()
        return card.allocator.allocated.now

    with ExitStack() as undo, recorder.call(), torch.no_grad():
        streamer.hook(undo.callback)
        recorder.enter("work")
        inputs = torch.zeros(1, 64, device=device.torch_device)
        streamer.begin()
        network(inputs)
        streamer.end()
        before = bytes_there()
        streamer.begin(make_way=lambda given_up: told.append((given_up, bytes_there())))
        network(inputs)
        streamer.end()
        streamer.clear()
    ((given_up, there),) = told
    assert given_up == sum(group.size for group in groups)
    assert there <= before - given_up + 2048  # activations


def test_several_threads_may_be_the_first() -> None:
    """The device was registered once for each of them, and all but one failed."""
    program = """
import threading, tightfit.simulator.backend as backend
start, failed = threading.Barrier(8), []
def first():
    start.wait()
    try:
        backend.use_cards(())
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
