"""From one plan to the next: what both read from files is not read in between, and all comes back in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from a_few import a_few
from tightfit import fit, load
from tightfit.apply.choices import choices_of, decide
from tightfit.apply.weights import store_factory
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.measure import build_models as building
from tightfit.measure.modules import find_components
from tightfit.schema.plan import Plan
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")
DISK: dict[str, Any] = {"placement": "stream", "offload_to": "disk"}
PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "by layers": DISK,
    "by blocks": DISK | {"granularity": "block"},
    "for its phase": DISK | {"placement": "offload"},
    "from host memory": {"placement": "stream", "offload_to": "cpu"},
    "fp8": DISK | {"storage": "float8_e4m3fn"},
    "int8 that stays": {"storage": "int8"},
    "channels-last": DISK | {"channels_last": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / CASE.name
    CASE.make().save_pretrained(made, max_shard_size="400KB")
    return made


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "LARGE", 256)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each weight that is read to stay."""
    sizes: list[int] = []
    read_like = store_factory.read_like

    def watched(*args: Any) -> torch.Tensor:
        value = read_like(*args)
        sizes.append(value.nbytes)
        return value

    def filled(group: WeightGroup, *args: Any) -> None:
        fill(group, *args)
        sizes.append(group.size)

    fill = WeightGroup.fill
    monkeypatch.setattr(store_factory, "read_like", watched)
    monkeypatch.setattr(WeightGroup, "fill", filled)
    return sizes


def plan_of(pipe: Any, name: str, device: str) -> Plan:
    choices, target = choices_of(None, {"components": {"unet": PLANS[name], "vae": DISK}}, device)
    return decide(pipe, choices, None, target)


def whole(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def state_of(pipe: Any) -> dict[str, torch.Tensor]:
    parts = find_components(pipe).items()
    return {f"{name}.{key}": value.clone() for name, part in parts for key, value in part.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("device", a_few(["cpu", "loopback"], "loopback"))
def test_each_plan_gives_what_it_gives_alone(device: str, folder: Path) -> None:
    """Fitted or loaded, from each to one that reads layers from files, on to fp8, and back: no picture is another."""
    pipe = whole(folder)
    before, ids = state_of(pipe), {name: id(weight) for name, weight in pipe.unet.named_parameters()}
    plans, wanted = {name: plan_of(pipe, name, device) for name in PLANS}, {}
    for name, plan in plans.items():
        alone = fit(pipe, plan=plan, device=device)
        wanted[name] = run(pipe, CASE)
        alone.undo()
    loaded = load(folder, plan={"components": {"unet": DISK, "vae": DISK}}, device=device, dtype="float32")
    loaded.pipe.set_progress_bar_config(disable=True)
    chain = [step for name in PLANS for step in ("by layers", name, "fp8")]
    for fitted, subject in ((fit(pipe, plan=plans[chain[0]], device=device), pipe), (loaded.fitted, loaded.pipe)):
        for name in chain:
            fitted.follow(subject, plans[name])
            assert torch.equal(run(subject, CASE), wanted[name]), name
        fitted.undo()
        after = state_of(subject)
        assert after.keys() == before.keys()
        for key, value in before.items():
            assert torch.equal(after[key], value)
            assert after[key].stride() == value.stride()
    assert {name: id(weight) for name, weight in pipe.unet.named_parameters()} == ids


@pytest.mark.parametrize("names", [("by layers", "by blocks"), ("by layers", "fp8"), ("fp8", "fp8")])
def test_what_both_read_from_files_is_not_read_in_between(
    names: tuple[str, str], folder: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And files that were written for a plan go when nothing needs them any more."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipe = whole(folder)
    plans = [plan_of(pipe, name, "cpu") for name in names]
    loaded = load(folder, plan={"components": {"unet": PLANS[names[0]], "vae": DISK}}, device="cpu")
    fitted = fit(pipe, plan=plans[0], device="cpu")
    for handle, subject in ((fitted, pipe), (loaded.fitted, loaded.pipe)):
        counts = []
        for plan in (plans[1], plans[0]) * 2:
            handle.follow(subject, plan)
            assert not read
            counts.append(len(list(tmp_path.iterdir())))
        assert counts[2:] == counts[:2]
        handle.undo()
        assert read
        read.clear()
    assert not list(tmp_path.iterdir())


def test_what_was_written_goes_with_it(folder: Path) -> None:
    pipe = whole(folder)
    plans = [plan_of(pipe, name, "cpu") for name in ("by layers", "by blocks")]
    weight = pipe.unet.mid_block.resnets[0].conv1.weight
    wanted = weight.detach() * 2
    fitted = fit(pipe, plan=plans[0], device="cpu")
    pipe.unet.mid_block.resnets[0].conv1.weight.data.mul_(2)
    for plan in (plans[1], plans[0]):
        fitted.follow(pipe, plan)
        assert torch.equal(pipe.unet.mid_block.resnets[0].conv1.weight, wanted)
    fitted.undo()
    assert pipe.unet.mid_block.resnets[0].conv1.weight is weight
    assert torch.equal(weight, wanted)


@pytest.mark.parametrize("where", ["apply.weights.weight_offloader.store_weights", "apply.fitting.devices_of"])
def test_a_plan_that_cannot_be_followed_leaves_the_pipeline_whole(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = whole(folder)
    before = state_of(pipe)
    plans = [plan_of(pipe, name, "cpu") for name in ("by layers", "fp8")]
    fitted = fit(pipe, plan=plans[0], device="cpu")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(f"tightfit.{where}", full)
    with pytest.raises(OSError, match="no space"):
        fitted.follow(pipe, plans[1])
    after = state_of(pipe)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not fitted.fitted
