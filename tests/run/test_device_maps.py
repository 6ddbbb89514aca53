"""device_map and max_memory of fit and load: numbers of one card, what is where, taken back, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import tightfit
from a_few import a_few
from inspection import assert_same, imprint
from run.test_several_devices import ONE, OTHER, cards_of
from run.test_shrinking import MIB, REQUEST, draw, large_unet
from tightfit import BudgetTooSmall, InputError, PlanError
from tightfit.apply import device_maps as applied
from tightfit.devices.choose import choose_device
from tightfit.devices.cuda import CudaDevice
from tightfit.devices.simulated import SimulatedDevice
from tightfit.errors import AlreadyFitted
from tightfit.measure.modules import find_components
from tightfit.run import device_maps
from tiny_pipelines import CASES, TinyCase, run
from together.trials import load as load_lora

pytestmark = pytest.mark.usefixtures("shared_footprints")

CASE = next(case for case in CASES if case.name == "StableDiffusion")
SMALL = {"height": 64, "width": 64, "steps": 2}
BOTH = {ONE: "96MiB", OTHER: "96MiB"}


def on_one_card(pipe: Any, case: TinyCase) -> torch.Tensor:
    cards_of(2**40)
    fitted = tightfit.fit(pipe, level=0, device=ONE)
    found = run(pipe, case).cpu()
    fitted.undo()
    return found


@pytest.mark.parametrize("devices", a_few(["balanced", "auto", "mapped"], "balanced", "mapped"))
@pytest.mark.parametrize("case", a_few(CASES, "StableDiffusionXL"))
def test_numbers_are_those_of_one_card_and_nothing_is_lost(case: TinyCase, devices: str) -> None:
    pipe = case.make()
    wanted, parts = on_one_card(pipe, case), find_components(pipe)
    before = imprint(pipe)
    cards = cards_of(96 * MIB, 96 * MIB)
    mapped: dict[str, str | int] = dict(zip(parts, [ONE, OTHER, "cpu", "disk"] * 3, strict=False))
    device_map: Any = mapped if devices == "mapped" else devices
    fitted = tightfit.fit(pipe, device_map=device_map, max_memory={**BOTH, 5: "1GB"}, request=SMALL)
    assert torch.equal(run(pipe, case).cpu(), wanted)
    assert set(pipe.hf_device_map) == set(parts)
    if devices == "mapped":
        assert pipe.hf_device_map == mapped
        assert fitted.plan.devices in ((ONE, OTHER), (OTHER, ONE))
    assert all(card.held.peak <= 96 * MIB for card in cards)
    assert "because: cuda:5 is ignored: max_memory names it" in str(fitted.report())
    fitted.undo()
    assert_same(before, imprint(pipe))
    assert pipe.hf_device_map is None


@pytest.mark.parametrize(
    ("ram", "places"),
    [
        pytest.param("1GB", ("cpu", "cpu"), marks=pytest.mark.slow),
        ("100MiB", ("disk", "cpu")),
        pytest.param(0, ("disk", "disk"), marks=pytest.mark.slow),
    ],
)
def test_too_little_for_the_cards_goes_to_host_memory_and_then_to_the_disk(
    ram: str | int, places: tuple[str, str]
) -> None:
    """148 MiB of a U-Net, on cards of 150 and 120 MiB: it is split, and each part has its own place."""
    cards_of(2**40)
    together = tightfit.fit(pipe := large_unet(), level=0, device=ONE)
    wanted = draw(pipe)
    together.undo()
    cards = cards_of(150 * MIB, 120 * MIB)
    memory = {ONE: "150MiB", OTHER: "120MiB", "cpu": ram}
    fitted = tightfit.fit(pipe, device_map="balanced", max_memory=memory, request=REQUEST)
    later = {f"unet.up_blocks.{index}": places[1] for index in range(2)}
    assert pipe.hf_device_map == {"unet": places[0], "vae": OTHER, "text_encoder": OTHER, **later}
    assert fitted.plan.components["unet"].placement == "stream"
    assert torch.equal(draw(pipe), wanted)
    for card, name in zip(cards, (ONE, OTHER), strict=True):
        assert 0 < card.held.peak <= fitted.plan.predicted_peak(name) <= card.accelerator.bytes


def test_a_refusal_says_what_would_do() -> None:
    cards_of(60 * MIB)
    pipe = large_unet()
    with pytest.raises(BudgetTooSmall, match=r"within 60 MiB on .* and 1 B of RAM: .* would do") as caught:
        tightfit.fit(pipe, max_memory={ONE: "60MiB", "cpu": 0}, request=REQUEST)
    assert not hasattr(pipe, "tightfit")
    needed = int(str(caught.value.facts["needed_bytes"]))
    cards_of(needed)
    tightfit.fit(pipe, max_memory={ONE: needed, "cpu": 0}, request=REQUEST)
    assert pipe.hf_device_map["unet"] == "disk"


def test_reset_takes_it_back_and_the_pipeline_is_an_ordinary_one() -> None:
    pipe = CASE.make()
    wanted, parts = run(pipe, CASE), find_components(pipe)
    cards_of(2**40, 2**40)
    here = SimulatedDevice(0).torch_device
    pipe.to(here)
    fitted = tightfit.fit(pipe, device_map="balanced", max_memory={ONE: "1GB", OTHER: "1GB"}, request=SMALL)
    assert set(pipe.hf_device_map.values()) == {ONE, OTHER}
    with pytest.raises(AlreadyFitted, match=r"undo\(\) before to\('cpu'\)"):
        pipe.to("cpu")
    with pytest.raises(AlreadyFitted, match=r"undo\(\) before enable_model_cpu_offload"):
        pipe.enable_model_cpu_offload()
    pipe.reset_device_map()
    assert (pipe.hf_device_map, fitted.fitted, "hf_device_map" in vars(pipe)) == (None, False, False)
    assert all(tensor.device.type == "cpu" for part in parts.values() for tensor in part.parameters())
    assert torch.equal(run(pipe, CASE), wanted)
    pipe.reset_device_map()  # as of any other
    pipe.to(here)
    on_card = run(pipe, CASE)
    assert on_card.device == here
    pipe.to("cpu")
    pipe.enable_model_cpu_offload(device=here)
    assert torch.equal(run(pipe, CASE), on_card)
    pipe.remove_all_hooks()


def test_the_device_map_that_diffusers_made_is_put_back_by_undo_and_dropped_by_reset() -> None:
    pipe = CASE.make()
    cards_of(2**40, 2**40)
    pipe.hf_device_map = theirs = {"unet": "cpu", "vae": "cpu"}
    for take_back in ("undo", "reset"):
        fitted = tightfit.fit(pipe, device_map={"unet": OTHER}, request=SMALL)
        assert pipe.hf_device_map == dict.fromkeys(find_components(pipe), OTHER)
        fitted.undo() if take_back == "undo" else pipe.reset_device_map()
        assert pipe.hf_device_map == (theirs if take_back == "undo" else None)


def test_without_a_request_it_is_made_at_the_first_call_also_on_another_card() -> None:
    """Until then no card is known to be the pipeline's."""
    pipe = CASE.make()
    wanted = on_one_card(pipe, CASE)
    first, second = cards_of(96 * MIB, 96 * MIB)
    fitted = tightfit.fit(pipe, device_map={"unet": OTHER, "vae": "cpu"}, max_memory=BOTH)
    assert pipe.hf_device_map == dict.fromkeys(find_components(pipe), "cpu")
    found = run(pipe, CASE)
    assert torch.equal(found.cpu(), wanted)
    assert (pipe.hf_device_map["unet"], pipe.hf_device_map["vae"]) == (OTHER, "cpu")
    assert found.device == pipe.device == SimulatedDevice(1).torch_device
    assert fitted.plan.devices == (OTHER,)
    assert (first.held.peak, 0 < second.held.peak <= 96 * MIB) == (0, True)
    assert 0 < fitted.report().trace.peak_bytes <= fitted.plan.predicted_peak(OTHER)


def test_a_budget_without_a_request_runs_where_its_plan_says() -> None:
    """The same for a budget: it ran on the first card, whatever the plan for the first call said."""
    pipe = CASE.make()
    first, second = cards_of(96 * MIB, 96 * MIB)
    fitted = tightfit.fit(pipe, budget=BOTH, device=OTHER)
    run(pipe, CASE)
    assert fitted.plan.devices == (OTHER,)
    assert first.held.peak == 0
    assert second.held.peak > 0


def test_what_users_of_diffusers_then_call_works(tmp_path: Path) -> None:
    pipe, plain = CASE.make(), CASE.make()
    load_lora(plain)
    wanted = on_one_card(plain, CASE)
    cards_of(96 * MIB, 96 * MIB)
    fitted = tightfit.fit(pipe, device_map={"unet": "cpu", "vae": OTHER}, max_memory=BOTH, request=SMALL)
    run(pipe, CASE)
    pipe.save_pretrained(tmp_path / "saved")
    load_lora(pipe)
    assert torch.equal(run(pipe, CASE).cpu(), wanted)
    assert (pipe.hf_device_map["unet"], pipe.hf_device_map["vae"]) == ("cpu", OTHER)
    pipe.unload_lora_weights()
    ordinary = copy.deepcopy(pipe)
    assert ordinary.hf_device_map is None
    fitted.undo()
    saved = DiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    saved.set_progress_bar_config(disable=True)
    assert torch.equal(run(saved, CASE), run(pipe, CASE))
    assert torch.equal(run(ordinary, CASE), run(pipe, CASE))


@pytest.mark.parametrize("devices", a_few(["balanced", "mapped"], "mapped"))
def test_a_folder_is_loaded_by_its_map(devices: str, tmp_path: Path) -> None:
    pipe = CASE.make()
    pipe.save_pretrained(tmp_path, max_shard_size="400KB")
    wanted = on_one_card(pipe, CASE)
    cards_of(96 * MIB, 96 * MIB)
    mapped: Any = {"unet": "disk", "text_encoder": OTHER, "vae": ONE} if devices == "mapped" else devices
    loaded = tightfit.load(
        tmp_path, device_map=mapped, max_memory={**BOTH, "cpu": "1GB"}, request=SMALL, dtype="float32"
    )
    loaded.pipe.set_progress_bar_config(disable=True)
    assert set(loaded.pipe.hf_device_map) == set(find_components(pipe))
    if devices == "mapped":
        assert loaded.pipe.hf_device_map == mapped
    else:
        assert set(loaded.pipe.hf_device_map.values()) == {ONE, OTHER}
    assert torch.equal(run(loaded.pipe, CASE).cpu(), wanted)
    loaded.pipe.reset_device_map()
    assert torch.equal(run(loaded.pipe, CASE), run(pipe, CASE))
    with pytest.raises(PlanError, match="unknown component in device_map 'vea': did you mean 'vae'"):
        tightfit.load(tmp_path, device_map={"vea": ONE})


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"device_map": OTHER}, {OTHER}),
        ({"device_map": OTHER, "max_memory": {OTHER: "96MiB"}}, {OTHER}),
        ({"device_map": "loopback"}, {"loopback"}),
        ({"device_map": "cpu"}, {"cpu"}),
        ({"device_map": torch.device("cpu")}, {"cpu"}),
        ({"device_map": {"": ONE}}, {ONE}),
        ({"device_map": {"": "cpu", "unet": ONE}}, {"cpu", ONE}),
        ({"device_map": {"": "cpu"}}, {"cpu"}),
        ({"device_map": "auto", "max_memory": {ONE: 0, OTHER: "96MiB"}}, {OTHER}),
        ({"max_memory": {0: "1GB", "mps": "1GB", "cpu": "50GB"}}, {"cpu"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_devices_are_written_as_users_of_diffusers_do(asked: Any, where: set[str]) -> None:
    cards_of(96 * MIB, 96 * MIB)
    pipe = CASE.make()
    fitted = tightfit.fit(pipe, request=SMALL, **asked)
    assert set(pipe.hf_device_map.values()) == where
    ignored = fitted.plan.device_map.ignored  # type: ignore[union-attr]
    assert ignored == (("cuda:0", "mps") if 0 in asked.get("max_memory", ()) else ())


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"device_map": {"unnet": ONE}}, PlanError, "unknown component in device_map 'unnet': did you mean 'unet'"),
        ({"device_map": {"unet.mid_block": ONE}}, PlanError, "names unet.mid_block, but unet computes on one device"),
        ({"device_map": {"unet": "simulated:7"}}, InputError, "simulated:7"),
        ({"device_map": {"unet": 1.5}}, InputError, "1.5 is no device"),
        (
            {"device_map": {"unet": ONE}, "max_memory": {OTHER: "1GB"}},
            PlanError,
            "has unet on simulated:0, but max_",
        ),
        ({"device_map": ONE, "max_memory": {OTHER: "1GB"}}, PlanError, "leaves that out: it names simulated:1"),
        ({"device_map": "balance"}, InputError, "unknown device_map 'balance': did you mean 'balanced'"),
        ({"device_map": "sequential"}, InputError, "unknown device_map 'sequential'"),
        ({"device_map": "balanced", "budget": "1GB"}, PlanError, "leave out budget='1GB'"),
        ({"max_memory": {ONE: "1GB"}, "ram": "1GB", "device": ONE}, PlanError, "leave out ram='1GB', device='sim"),
        (
            {"max_memory": {"cuda:0": "1GB", 7: "1GB"}},
            PlanError,
            "there is no cuda:0 or cuda:7 on this computer",
        ),
        ({"max_memory": {}}, PlanError, "no device in it"),
        ({"max_memory": {"gpu0": "1GB"}}, InputError, "unknown device in max_memory 'gpu0'"),
        ({"max_memory": {ONE: "much"}}, InputError, "'much' is not a size"),
        ({"max_memory": {ONE: "1GB", "simulated": "2GB"}}, PlanError, "names simulated:0 twice"),
        ({"device_map": "balanced", "allow": ["fp9"]}, PlanError, "did you mean 'fp8'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_is_said_before_anything_is_changed(asked: Any, error: type[Exception], said: str) -> None:
    cards_of(2**40, 2**40)
    pipe = CASE.make()
    before = imprint(pipe)
    with pytest.raises(error, match=said):
        tightfit.fit(pipe, **asked)
    assert_same(before, imprint(pipe))


def test_numbers_are_cuda_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by simulated ones: this computer has none."""
    cards_of(96 * MIB, 96 * MIB)
    played = lambda name: choose_device(str(name).replace("cuda", "simulated"))  # noqa: E731
    monkeypatch.setattr(device_maps, "choose_device", played)
    memory: Any = {0: "90MB", 1: 80_000_000, "cpu": "1GB", 2: "5GB"}
    asked: Any = {"unet": 1, "vae": torch.device("cuda", 0), "text_encoder": "cpu"}
    target = device_maps.target_of_map(asked, memory, (), list(asked))
    assert [device.name for device in target.devices] == [ONE, OTHER]
    budget, fixed = target.limits.budget, target.limits.device_map
    assert budget == tightfit.Budget(devices={ONE: 90_000_000, OTHER: 80_000_000}, ram="1GB")
    assert fixed is not None
    assert (fixed.components, fixed.ignored) == ({"unet": OTHER, "vae": ONE, "text_encoder": "cpu"}, ("cuda:2",))
    monkeypatch.setattr(device_maps, "usable_cards", lambda: (0, 1))
    free = device_maps.target_of_map("balanced", None, ["fp8"], ["unet"], lambda device: 0).limits
    assert free.budget is not None
    assert set(free.budget.devices) == {ONE, OTHER}
    assert all(0.94 * 96 * MIB < size < 96 * MIB for size in free.budget.devices.values())
    assert free.allow == ("fp8",)


def test_a_cuda_card_is_a_number_in_what_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "choose_device", lambda name: CudaDevice(int(name.removeprefix("cuda:"))))
    parts: Any = {"vae": {"device": "cuda:1"}, "text_encoder": {"placement": "offload", "offload_to": "disk"}}
    plan = tightfit.Plan.from_mapping({"device": "cuda:0", "components": parts})
    assert applied.hf_device_map(plan, CASE.make()) == {"unet": 0, "vae": 1, "text_encoder": "disk"}


def test_a_single_network_takes_no_map() -> None:
    with pytest.raises(PlanError, match="a budget is for a whole pipeline"):
        tightfit.fit(CASE.make().unet, device_map="cpu")


def test_a_call_that_cannot_be_measured_runs_where_the_map_says() -> None:
    pipe = CASE.make()
    wanted = on_one_card(pipe, CASE)
    passes = {id(pipe.unet): 0}

    def count(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        passes[id(module)] += 1

    pipe.unet.register_forward_hook(count)
    cards_of(96 * MIB, 96 * MIB)
    fitted = tightfit.fit(pipe, device_map={"text_encoder": OTHER, "vae": "disk"}, max_memory=BOTH, request={})
    assert (fitted.plan.level, fitted.plan.device_of("text_encoder")) == (3, OTHER)
    assert pipe.hf_device_map["vae"] == "disk"
    assert torch.allclose(run(pipe, CASE).cpu(), wanted, atol=1e-5)
