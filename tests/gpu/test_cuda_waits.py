"""Within a step the host waits for the card no more often under a budget than without one: counted by the driver's
stand-in, where the tests run on that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import tightfit
from more_pipelines import MORE_CASES
from tightfit.devices.cuda_support import cuda_count
from tiny_pipelines import CASES, TinyCase

COUNTED = hasattr(ctypes.CDLL(None), "stub_get")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif(not COUNTED, reason="a real driver does not count who waits"),
]

WAITS = ("stream_syncs", "event_syncs", "device_syncs", "copies_D2H", "copies_H2D")  # pageable memory: the host waits
STEPS = 4


def counted(*names: str) -> dict[str, int]:
    get = ctypes.CDLL(None).stub_get
    get.restype = ctypes.c_longlong
    return {name: get(name.encode()) for name in names}


def waits_of_a_step(pipe: Any, case: TinyCase) -> dict[str, int]:
    """How often the host waits from the end of one step to that of the next."""
    seen: list[dict[str, int]] = []

    def step_done(_: Any, step: int, __: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(counted(*WAITS))
        return kwargs

    inputs = {**case.call(), "num_inference_steps": STEPS, "callback_on_step_end": step_done}
    with torch.no_grad():
        pipe(**inputs)
    return {name: seen[2][name] - seen[1][name] for name in WAITS}


@pytest.mark.parametrize("name", ["StableDiffusion", "StableDiffusionXL", "Flux"])
@pytest.mark.parametrize("how", [{"budget": 512 * 2**20}, {"level": 3}], ids=["budget", "streamed"])
def test_no_waits_within_a_step_but_the_pipelines_own(name: str, how: dict[str, Any]) -> None:
    case: TinyCase = next(case for case in CASES if case.name == name)
    pipe, fits = case.make(), tightfit.fit
    plain = fits(pipe, level=0, device="cuda")
    wanted = waits_of_a_step(pipe, case)
    plain.undo()
    locked = counted("host_registers", "host_unregisters")
    fitted = fits(pipe, device="cuda", **how)
    assert waits_of_a_step(pipe, case) == wanted
    fitted.undo()
    made, undone = counted("host_registers", "host_unregisters").values()
    assert made - locked["host_registers"] == undone - locked["host_unregisters"] > 0


@pytest.mark.parametrize(("name", "more"), [("Flux", 1), ("QwenImage", 0)])
def test_guidance_together_waits_for_the_timestep_alone(name: str, more: int) -> None:
    """Flux makes it anew for a step's second call; QwenImage's two prompts cannot be joined, so nothing is compared."""
    case: TinyCase = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe, found = case.make(), []
    for guidance in (None, "batched"):
        part = {"components": {"transformer": {"cfg": guidance}}}
        fitted = tightfit.fit(pipe, plan={"level": 0, **part}, device="cuda")
        found.append(waits_of_a_step(pipe, case))
        fitted.undo()
    plain, together = found
    assert together == plain | {"stream_syncs": plain["stream_syncs"] + more}
