"""A model folder, loaded to follow a plan: as if it had been loaded whole and fitted then, without loading it whole."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from a_few import a_few
from tightfit import Budget, BudgetTooSmall, PlanError, Request, fit, load
from tightfit.apply.weights import quantize as storage
from tightfit.measure import build_models as building
from tightfit.measure.modules import find_components, find_role
from tightfit.run import load as loading
from tiny_pipelines import CASES, TinyCase, run

PLANS: dict[str, dict[str, Any]] = {
    "on the disk": {"placement": "stream", "offload_to": "disk"},
    "fp8": {"placement": "stream", "storage": "float8_e4m3fn"},
    "fp8 on the disk": {"placement": "stream", "offload_to": "disk", "storage": "float8_e4m3fn"},
    "int8 on the disk": {"placement": "stream", "offload_to": "disk", "storage": "int8"},
    "fp8 for bfloat16": {"placement": "offload", "storage": "float8_e5m2", "compute_dtype": "bfloat16"},
    "fp8 on the disk for bfloat16": {
        "placement": "stream",
        "offload_to": "disk",
        "storage": "float8_e5m2",
        "compute_dtype": "bfloat16",
    },
    "fp8 that skips": {
        "placement": "stream",
        "offload_to": "disk",
        "storage": "float8_e4m3fn",
        "skip_patterns": ["to_q", "ff"],
    },
    "on the disk, channels-last": {"placement": "stream", "offload_to": "disk", "channels_last": True},
    "fp8 on the disk, channels-last": {
        "placement": "stream",
        "offload_to": "disk",
        "storage": "float8_e4m3fn",
        "channels_last": True,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for case in CASES:
        if case.name in ("StableDiffusion", "Flux"):
            found[case.name] = tmp_path_factory.mktemp("models") / case.name
            case.make().save_pretrained(found[case.name], max_shard_size="400KB")
    return found


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tiny networks are built without weights."""
    monkeypatch.setattr(building, "LARGE", 256)


def whole(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def case_of(name: str) -> TinyCase:
    return next(case for case in CASES if case.name == name)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("device", a_few(["cpu", "loopback"], "loopback"))
@pytest.mark.parametrize(
    ("name", "plan"),
    [("StableDiffusion", plan) for plan in PLANS] + [("Flux", "on the disk"), ("Flux", "int8 on the disk")],
)
def test_as_if_loaded_whole_and_fitted(name: str, plan: str, device: str, folders: dict[str, Path]) -> None:
    case, pipe = case_of(name), whole(folders[name])
    plain = run(pipe, case)
    denoiser = next(n for n, part in find_components(pipe).items() if find_role(n, part) == "denoiser")
    choices = {"components": {denoiser: PLANS[plan], "vae": {"placement": "stream", "offload_to": "disk"}}}
    fitted = fit(pipe, plan=choices, device=device)
    wanted = run(pipe, case)
    fitted.undo()

    loaded = load(folders[name], plan=choices, device=device)
    loaded.pipe.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert torch.equal(run(loaded.pipe, case), wanted)
    assert loaded.fitted.report().trace.lossy == fitted.report().trace.lossy
    loaded.fitted.undo()
    for part, module in find_components(pipe).items():
        mine = find_components(loaded.pipe)[part].state_dict()
        assert mine.keys() == module.state_dict().keys()
        for key, value in module.state_dict().items():
            same = mine[key]
            assert (value.dtype, value.stride(), value.device) == (same.dtype, same.stride(), same.device)
            assert torch.equal(value, same)
    assert torch.equal(run(loaded.pipe, case), plain)


@pytest.mark.parametrize("plan", ["fp8", "fp8 on the disk", "int8 on the disk"])
def test_what_is_stored_in_eight_bits_is_loaded_weight_by_weight(
    plan: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a plan wants in eight bits, no more than one weight is there as the files hold it."""
    read, values = storage.read_like, []

    def watched(*args: Any) -> torch.Tensor:
        assert sum(value() is not None for value in values) <= 1
        value = read(*args)
        values.append(weakref.ref(value))
        return value

    monkeypatch.setattr(storage, "read_like", watched)
    choices = {"components": {"transformer": PLANS[plan]}}
    loaded = load(folders["Flux"], plan=choices, device="loopback", dtype="float32")
    assert len(values) > 20
    monkeypatch.undo()
    loaded.fitted.undo()


def test_a_budget_makes_the_plan_before_anything_is_loaded(folders: dict[str, Path]) -> None:
    """And calls that ask for more are planned for."""
    case = case_of("StableDiffusion")
    plain, asked = run(whole(folders[case.name]), case), {"height": 8, "width": 8, "steps": 2}
    loaded = load(folders[case.name], budget="300MB", request=asked, device="loopback", dtype="float32")
    loaded.pipe.set_progress_bar_config(disable=True)
    assert loaded.fitted.plan.forecast
    assert loaded.fitted.plan.budget == Budget(device="300MB")
    assert torch.allclose(run(loaded.pipe, case), plain, atol=1e-5)
    assert (loaded.fitted.plan.request or Request()).height == case.call()["height"]
    loaded.fitted.undo()
    assert torch.equal(run(loaded.pipe, case), plain)


def test_what_stays_in_files_is_planned_for_too(folders: dict[str, Path]) -> None:
    """Weights that are read as they are used come to stay for a small picture, and go for the next large one."""
    case = case_of("StableDiffusion")
    plain, asked = run(whole(folders[case.name]), case), {"height": 64, "width": 64, "batch": 2, "steps": 2}
    loaded = load(folders[case.name], budget="50MiB", ram="1KB", request=asked, device="loopback", dtype="float32")
    loaded.pipe.set_progress_bar_config(disable=True)

    def places() -> dict[str, str]:
        return {name: part.described for name, part in loaded.fitted.plan.components.items()}

    large = places()
    assert "from disk" in large["unet"]
    assert torch.allclose(run(loaded.pipe, case), plain, atol=1e-5)
    loaded.pipe(**case.call() | {"height": 8, "width": 8})
    assert set(places().values()) == {"resident"}
    assert torch.allclose(run(loaded.pipe, case), plain, atol=1e-5)
    assert places() == large
    assert f"unet: {large['unet']} (before: resident)" in str(loaded.fitted.report().trace.notes)
    loaded.fitted.undo()
    assert torch.equal(run(loaded.pipe, case), plain)


def test_what_does_not_fit_is_not_loaded(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "build_lazily", lambda *_: pytest.fail("loaded"))
    with pytest.raises(BudgetTooSmall, match="would do"):
        load(folders["StableDiffusion"], budget="1MB", device="loopback")
    with pytest.raises(PlanError, match="whole pipeline"):
        load(folders["StableDiffusion"] / "unet", budget="1GB", device="loopback")
    with pytest.raises(PlanError, match="at most one"):
        load(folders["StableDiffusion"], budget="1GB", level=1)
