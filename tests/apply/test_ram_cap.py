"""On a CPU nobody refuses memory: a process that holds more than its budget gives up what stays, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightfit import fit
from tightfit.devices.device import CpuDevice
from tightfit.measure.modules import find_components, weight_bytes
from tiny_pipelines import CASES, run


def test_the_cap_is_a_number_until_it_is_undone() -> None:
    device = CpuDevice()
    assert device.excess_bytes(lambda: pytest.fail("asked without need")) == 0
    undo = device.limit_memory(100)
    assert [device.excess_bytes(lambda held=held: held) for held in (150, 100, 50)] == [50, 0, 0]
    undo()
    assert device.excess_bytes(lambda: 150) == 0


@pytest.mark.parametrize("beyond", [0, 1, 10**12])
def test_what_stays_goes_where_the_process_holds_more(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk where that is enough; all of them, and a word about it, where nothing is; the picture is the same."""
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 2**13)
    case = next(case for case in CASES if case.name == "StableDiffusion")
    pipe = case.make()
    untouched = run(pipe, case)
    most = weight_bytes(find_components(pipe)["unet"]) * 3 // 4
    plan: dict[str, Any] = {
        "components": {"unet": {"placement": "stream", "offload_to": "disk", "weight_memory": most}}
    }
    fitted = fit(pipe, plan=plan, device="cpu")
    for _ in range(2):  # the first call does not know in which order layers come
        assert torch.equal(run(pipe, case), untouched)
    before = fitted.report().trace
    asked = []

    def over(self: CpuDevice, held: Callable[[], int]) -> int:
        assert held() > 10**7  # of this very process
        asked.append(held)
        return beyond if len(asked) == 5 else 0  # the first is at the beginning, this at the second step

    monkeypatch.setattr(CpuDevice, "excess_bytes", over)
    assert torch.equal(run(pipe, case), untouched)
    after = fitted.report().trace
    told = [note for note in after.notes if "more RAM than it may" in note]
    assert len(told) == (0, 1, 2)[(beyond > 0) + (beyond > 1)]
    assert len(asked) > 5
    bytes_in = [sum(phase.bytes_in for phase in trace.phases) for trace in (before, after)]
    assert (bytes_in[1] > bytes_in[0]) == (beyond > 0)


def test_a_budget_is_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[int] = []
    monkeypatch.setattr(CpuDevice, "limit_memory", lambda self, size: caps.append(size) or (lambda: None))
    pipe = next(case for case in CASES if case.name == "StableDiffusion").make()
    request = {"height": 16, "width": 16, "steps": 1}
    fit(pipe, budget="30GB", ram="20GB", device="cpu", request=request).undo()
    assert caps == [20 * 10**9]
