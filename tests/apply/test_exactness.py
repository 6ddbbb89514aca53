"""Every level, every technique and every pair of techniques, on every tiny pipeline, against the untouched one.

Placement and streaming: bit for bit. Slicing and channels-last: up to float rounding. What is lossy says so.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from inspection import assert_same, imprint, relative_error
from tightfit import fit
from tightfit.measure.modules import find_components, find_role
from tiny_pipelines import CASES, TinyCase, run

ROUNDING = 1e-5  # relative, float32
TECHNIQUES = ("slicing", "one-tile", "offload", "stream", "waiting", "channels-last", "fp8")
ROUNDED = {"slicing", "channels-last"}
NAMES = [case.name for case in CASES]
GROUPS = [*((name,) for name in TECHNIQUES), *itertools.combinations(TECHNIQUES, 2)]
# each pair is tried on a fourth of the pipelines, and in the slow tests on the others
TRIED = [
    pytest.param(name, group, id=f"{name}-{'+'.join(group)}", marks=() if soon else pytest.mark.slow)
    for place, name in enumerate(NAMES)
    for number, group in enumerate(GROUPS)
    for soon in [len(group) == 1 or (place + number) % 4 == 0]
]


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[TinyCase, Any, torch.Tensor]:
    """The case, its pipeline (one for all tests: `undo()` gives it back as it was) and its untouched output."""
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    return case, pipe, run(pipe, case)


def plan_of(pipe: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Plan fields that switch these techniques on, wherever the pipeline has a place for them."""
    vae: dict[str, Any] = {}
    components: dict[str, dict[str, Any]] = {name: {} for name in find_components(pipe)}
    plan: dict[str, Any] = {"vae": vae, "components": components}
    denoisers = [name for name, module in find_components(pipe).items() if find_role(name, module) == "denoiser"]
    for technique in names:
        match technique:
            case "slicing":
                vae["slicing"] = True
            case "one-tile":
                vae["tile"] = 64
            case "offload":
                for component in components.values():
                    component.setdefault("placement", "offload")
            case "stream":
                for name in denoisers:
                    components[name]["placement"] = "stream"
            case "waiting":
                plan["offload_activations"] = True
            case "channels-last":
                for component in components.values():
                    component["channels_last"] = True
            case "fp8":
                for name in denoisers:
                    components[name]["storage"] = "float8_e4m3fn"
    return plan


@pytest.mark.one_in(9)
@pytest.mark.parametrize("device", ["cpu", "loopback"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_level_gives_the_same_pictures_and_leaves_no_trace(name: str, level: int, device: str) -> None:
    case, pipe, untouched = prepared(name)
    before = imprint(pipe)
    fitted = fit(pipe, level=level, device=device)
    first, second = run(pipe, case), run(pipe, case)
    trace = fitted.report().trace
    fitted.undo()
    assert torch.equal(first, second)
    assert trace.lossy == ()
    if level == 0 or len(untouched) == 1:
        assert torch.equal(first, untouched)
    else:
        assert relative_error(first, untouched) <= ROUNDING  # slicing
    assert_same(before, imprint(pipe))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "techniques"), TRIED)
def test_techniques_alone_and_in_pairs(name: str, techniques: tuple[str, ...]) -> None:
    case, pipe, untouched = prepared(name)
    before = imprint(pipe)
    fitted = fit(pipe, plan=plan_of(pipe, techniques), device="loopback")
    first, second = run(pipe, case), run(pipe, case)
    trace = fitted.report().trace
    fitted.undo()
    assert torch.equal(first, second)
    assert_same(before, imprint(pipe))
    if "fp8" in techniques:
        assert any(what.startswith("fp8: ") for what in trace.lossy)
        assert any(what.startswith("fp8: ") for what in fitted.plan.lossy)
        assert not torch.equal(first, untouched)
        stored = fp8_output(name)
        if ROUNDED & set(techniques):  # by its norm: the worst of a video's pixels differ by 1.1e-5 of the largest
            assert float((first - stored).norm() / stored.norm()) <= 2e-6
        else:
            assert torch.equal(first, stored)
    elif ROUNDED & set(techniques):
        assert trace.lossy == ()
        assert relative_error(first, untouched) <= ROUNDING
    else:
        assert trace.lossy == ()
        assert torch.equal(first, untouched)


@functools.lru_cache(maxsize=1)
def fp8_output(name: str) -> torch.Tensor:
    case, pipe, _ = prepared(name)
    fitted = fit(pipe, plan=plan_of(pipe, ("fp8",)), device="loopback")
    output = run(pipe, case)
    fitted.undo()
    return output


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_real_tiles_are_named_as_lossy(name: str) -> None:
    case, pipe, untouched = prepared(name)
    fitted = fit(pipe, plan={"vae": {"tile": 32}}, device="cpu")
    output, trace = run(pipe, case), fitted.report().trace
    fitted.undo()
    assert any(what.startswith("blended-tiling: decode") for what in trace.lossy)
    assert any(what.startswith("blended-tiling: ") for what in fitted.plan.lossy)
    assert not fitted.report().lossless
    assert output.shape == untouched.shape
    assert not torch.equal(output, untouched)
    assert torch.equal(run(pipe, case), untouched)
