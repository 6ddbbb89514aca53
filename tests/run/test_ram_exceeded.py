"""On a CPU nobody refuses memory: a process that held more than it may is planned for anew, and goes on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tightfit
from a_few import a_few
from run.test_learning import from_disk
from run.test_shrinking import MIB, REQUEST, STEPS, draw, large_unet
from tightfit import Budget, BudgetTooSmall, Request
from tightfit.devices import ram
from tightfit.devices.device import CpuDevice
from tightfit.devices.memory import RamExceeded, trim_heap
from tightfit.devices.ram import GroupMemory, held_bytes
from tightfit.measure.recorder import Recorder
from tightfit.run.call_arguments import Prompt
from tightfit.run.job import Job
from tightfit.run.limits import Limits

pytestmark = pytest.mark.usefixtures("shared_footprints")


def resident_now() -> int:
    gc.collect()
    trim_heap()
    return held_bytes()


def test_somebody_else_in_the_process_takes_memory() -> None:
    """Of a budget with room for 150 MiB of U-Net, most is taken after the first step: its layers come from files."""
    wanted, pipe = draw(large_unet()), large_unet()
    tightfit.fit(pipe, ram="20GB", device="cpu", request=REQUEST).undo()  # all libraries that planning needs are there
    most = resident_now() + 340 * MIB
    fitted = tightfit.fit(pipe, ram=most, device="cpu", request=REQUEST)
    assert fitted.plan.components["unet"].placement == "resident"
    taken: list[torch.Tensor] = []

    def take(step: int) -> None:
        if not taken:
            taken.append(torch.ones(400 * MIB, dtype=torch.uint8))

    assert torch.equal(draw(pipe, take), wanted)
    trace = fitted.report().trace
    assert any("more than it may: planned anew within" in note and "unet: stream" in note for note in trace.notes)
    assert fitted.plan.components["unet"].placement == "stream"
    assert fitted.plan.components["unet"].offload_to == "disk"
    assert [phase.name for phase in trace.phases][:2] == ["encode", "denoise"]
    taken.clear()
    assert torch.equal(draw(pipe), wanted)
    after = fitted.report().trace
    assert not after.notes
    assert after.rss_peak_bytes < most
    fitted.undo()
    assert torch.equal(draw(pipe), wanted)


def test_the_limit_of_the_control_group_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, to little more than is held: weights go, and the rest is planned within what is left.

    What others in the process held at `fit`, and freed since, does not count.
    """
    wanted, pipe = draw(large_unet(640)), large_unet(640)
    of_others = torch.ones(150 * MIB, dtype=torch.uint8)
    fitted = tightfit.fit(pipe, ram="20GB", device="cpu", request=REQUEST)
    del of_others
    assert fitted.plan.components["unet"].placement == "resident"
    limits: list[int] = []
    monkeypatch.setattr(ram, "_groups_with_limit", lambda: (GroupMemory(size, held_bytes()) for size in limits))

    def lower(step: int) -> None:
        if not limits:
            limits.append(resident_now() + 20 * MIB)

    assert torch.equal(draw(pipe, lower), wanted)
    assert any("planned anew" in note and "unet: stream" in note for note in fitted.report().trace.notes)
    assert fitted.plan.components["unet"].offload_to == "disk"
    assert torch.equal(draw(pipe), wanted)
    assert held_bytes() < limits[0]
    limits[0] = 100 * MIB
    with pytest.raises(BudgetTooSmall, match=r"within 10\d MiB, while this process holds .* would do"):
        draw(pipe)
    limits.clear()
    fitted.undo()
    assert torch.equal(draw(pipe), wanted)


def exceeding(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool], held: int | None = None) -> list[int]:
    """At the asks `when` says so, the process holds too much (`held` bytes, or what it holds); counts the asks."""
    asked: list[int] = []

    def over(self: CpuDevice, now: Callable[[], int]) -> int:
        asked.append(now())
        return 10**12 if when(len(asked)) else 0

    monkeypatch.setattr(CpuDevice, "excess_bytes", over)
    if held is not None:
        monkeypatch.setattr(Recorder, "highest_rss", lambda self: held)
    return asked


def open_files(folder: Path) -> int:
    handles = [handle for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
    return sum(os.readlink(handle).startswith(f"{folder}/") for handle in handles)


# the beginning, the first step, the second, the decoder
@pytest.mark.parametrize("at", a_few([2, 4, 5, 4 + STEPS], "2", "5"))
def test_nothing_is_computed_twice(
    at: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What networks gave back is in a file without a name meanwhile, which goes when the call is over."""
    folder: Path = tmp_path_factory.mktemp("temporary")
    wanted, pipe = draw(large_unet()), large_unet()
    fitted = tightfit.fit(pipe, ram="20GB", device="cpu", request=REQUEST)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    steps: list[object] = []
    hook = pipe.unet.register_forward_hook(lambda *_: steps.append(open_files(folder)))
    exceeding(monkeypatch, lambda ask: ask == at)
    assert torch.equal(draw(pipe), wanted)
    assert len(steps) == STEPS
    assert 1 in steps
    assert open_files(folder) == 0
    assert not list(folder.iterdir())
    hook.remove()
    (note,) = fitted.report().trace.notes
    assert f"went on after {at - 2} passes that were done: nothing else is done" in note
    fitted.undo()


def test_too_little_is_an_error_that_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, pipe = draw(large_unet()), large_unet()
    fitted = tightfit.fit(pipe, ram="20GB", device="cpu", request=REQUEST)
    with monkeypatch.context() as patched:
        exceeding(patched, lambda ask: ask == 5, held=40 * 10**9)
        with pytest.raises(BudgetTooSmall, match=r"within 18.6 GiB, while this process holds 36.9.*would do") as error:
            draw(pipe)
    assert isinstance(error.value.__cause__, RamExceeded)
    assert torch.equal(draw(pipe), wanted)  # where it holds less again, it goes on as before
    assert not fitted.report().trace.notes
    fitted.undo()


def test_after_the_last_pass_the_next_call_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, pipe = draw(large_unet()), large_unet()
    fitted = tightfit.fit(pipe, ram="20GB", device="cpu", request=REQUEST)
    last = 5 + STEPS
    asked = exceeding(monkeypatch, lambda ask: ask == last)
    assert torch.equal(draw(pipe), wanted)
    assert len(asked) == last
    assert "no weights were left" in str(fitted.report().trace.notes)
    assert torch.equal(draw(pipe), wanted)
    (note,) = fitted.report().trace.notes
    assert "more than it may, in the call before: planned anew" in note
    fitted.undo()


@pytest.mark.parametrize("store", a_few(["cpu", "disk"], "disk"))
def test_a_run_of_the_command_line_is_planned_anew_too(
    store: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, asked = Limits(Budget(ram="20GB")), Request.from_mapping(REQUEST)
    job = Job(Prompt("a fox", 1), asked, choices={}, limits=limits, model=str(tiny_model), device="cpu", out=tmp_path)
    job.prepare()
    if store == "disk":
        monkeypatch.setattr("tightfit.run.run_target.plan_within", from_disk)
    job.load()
    assert {part.offload_to for part in job.fitted.plan.components.values()} == {store}
    exceeding(monkeypatch, lambda ask: ask == 5)
    job.run()
    assert "more than it may: planned anew" in str(job.report.trace.notes)
    assert len(list(tmp_path.iterdir())) == 1
