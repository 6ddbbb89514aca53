"""tightfit.fit(pipe, budget=…) on simulated cards: it fits, takes as long as predicted, changes no number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXVideoToVideoPipeline,
    FluxPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import AttnProcessor
from PIL import Image

import tightfit
from more_pipelines import MORE_CASES
from simulator.conftest import ACCELERATOR
from tightfit import Budget, BudgetTooSmall, InputError, PlanError
from tightfit.catalog.known import known_card, known_model
from tightfit.devices.ram import held_bytes
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import inspect_pipeline
from tightfit.plan.component_order import schedule_of
from tightfit.run.call_arguments import Prompt, call_arguments, request_of, shape_of
from tightfit.run.footprints import measure_footprint
from tightfit.schema.footprint import StripProfile
from tightfit.schema.machine import Accelerator
from tightfit.schema.results import Trace
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20
REQUEST = tightfit.Request(height=256, width=256, steps=4)
NAMES = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
TINY = [case for case in CASES if case.name in ("StableDiffusionXL", "Flux")]


def card_of(size: int, like: Accelerator, values: Any = "shapes") -> None:
    use_cards([SimulatedCard(0, like.model_copy(update={"bytes": size}), Host(), values=values)])


def called(fitted: Any, pipe: Any) -> Trace:
    with torch.no_grad():
        pipe(**call_arguments(pipe, Prompt("a fox", seed=0), REQUEST) | {"output_type": "pt"})
    trace: Trace = fitted.report().trace
    return trace


@pytest.mark.parametrize("mib", [280, 1000])
def test_a_card_of_that_size_is_enough_and_steps_take_what_was_said(mib: int) -> None:
    card_of(mib * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget=mib * MIB, request=REQUEST, device="simulated:0")
    assert fitted.plan.lossless
    trace = called(fitted, pipe)
    assert not [note for note in trace.notes if "memory" in note]
    told = {phase.name: phase for phase in fitted.plan.forecast}
    for phase in trace.phases:
        assert phase.peak_bytes <= told[phase.name].peak_bytes <= mib * MIB
    (denoise,) = (phase for phase in trace.phases if phase.name == "denoise")
    assert told["denoise"].seconds == pytest.approx(denoise.seconds, rel=0.03)
    fitted.undo()


def test_the_first_call_knows_who_comes_next() -> None:
    card_of(1000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    plan = tightfit.fit(pipe, budget="1000MiB", request=REQUEST, device="simulated:0").plan
    assert [stint.component for stint in plan.schedule] == ["text_encoder", "unet", "vae"]
    told = {phase.name: phase.peak_bytes for phase in plan.forecast}
    seconds = []
    for order in (plan.schedule, ()):
        card_of(1000 * MIB, known_card("rtx3060"))
        trace = called(tightfit.fit(pipe, plan=plan.model_copy(update={"schedule": order})), pipe)
        assert all(phase.peak_bytes <= max(told.values()) for phase in trace.phases)
        seconds.append(trace.seconds)
    assert seconds[0] < seconds[1]


def test_what_has_no_work_does_not_come() -> None:
    """The picture tower of Qwen-Image's text model, in a first call from a prompt."""
    case = next(case for case in MORE_CASES if case.name == "QwenImage")
    order = schedule_of(measure_footprint(case.make(), {"height": 64, "width": 64, "steps": 2}))
    (encoding,) = (stint for stint in order if stint.component == "text_encoder")
    assert encoding.unused_blocks == ("model.visual",)
    parts = {name: {"placement": "stream", "weight_memory": "1MiB"} for name in ("text_encoder", "transformer", "vae")}
    brought, pictures = [], []
    for known in (order, [stint.model_copy(update={"unused_blocks": ()}) for stint in order]):
        card_of(96 * MIB, ACCELERATOR, "real")
        pipe = case.make()
        plan = {"components": parts, "schedule": [stint.to_mapping() for stint in known]}
        fitted = tightfit.fit(pipe, plan=plan, device="simulated:0")
        pictures.append(run(pipe, case).cpu())
        brought.append(sum(phase.bytes_in for phase in fitted.report().trace.phases))
    text_encoder = next(c for c in inspect_pipeline(case.make()).components if c.name == "text_encoder")
    unused = sum(layer.bytes for layer in text_encoder.layers if layer.name.startswith("model.visual."))
    assert brought[1] - brought[0] >= unused > 0
    assert torch.equal(*pictures)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_numbers_are_those_of_the_untouched_pipeline(case: TinyCase) -> None:
    wanted = run(case.make(), case)
    card_of(96 * MIB, ACCELERATOR, "real")
    pipe = case.make()
    asked = {ours: case.call()[theirs] for theirs, ours in NAMES.items() if theirs in case.call()}
    fitted = tightfit.fit(pipe, budget="96MiB", request=asked, device="simulated:0")
    assert fitted.plan.expandable_segments
    found = run(pipe, case).cpu()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    fitted.undo()
    assert torch.equal(run(pipe, case), wanted)


def test_a_second_budget_replaces_the_first_and_a_small_one_is_refused() -> None:
    card_of(4000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    first = tightfit.fit(pipe, budget="3GiB", request=REQUEST, device="simulated:0")
    assert {part.placement for part in first.plan.components.values()} == {"resident"}
    second = tightfit.fit(pipe, budget=Budget(device="500MiB"), request=REQUEST, device="simulated:0")
    assert not first.fitted
    assert second.plan.components["unet"].placement == "stream"
    with pytest.raises(
        BudgetTooSmall, match=r"StableDiffusionPipeline cannot do 256×256 within 100 MiB on .* MiB would"
    ):
        tightfit.fit(pipe, budget="100MiB", request=REQUEST, device="simulated:0")


def test_a_plan_is_a_file(tmp_path: Path) -> None:
    card_of(4000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    plan = tightfit.fit(pipe, budget="500MiB", request=REQUEST, device="simulated:0").plan
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml())
    again = tightfit.fit(pipe, plan=file, device="simulated:0").plan
    assert again.components == plan.components
    assert (again.vae, again.budget, again.forecast) == (plan.vae, plan.budget, plan.forecast)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"budget": "8GB", "level": 1}, "budget=8GB, level=1"),
        ({"level": 1, "ram": "4GB"}, "ram=4GB"),
        ({"budget": Budget(device="8GB", ram="1GB"), "ram": "2GB"}, "leave one out"),
    ],
)
def test_what_is_illegal_is_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        tightfit.fit(TINY[0].make(), **wanted)


def test_a_budget_is_a_size_and_for_a_pipeline() -> None:
    with pytest.raises(InputError, match="'8 GBit' is not a size"):
        tightfit.fit(TINY[0].make(), budget="8 GBit")
    with pytest.raises(PlanError, match="a budget is for a whole pipeline"):
        tightfit.fit(torch.nn.Linear(2, 2), budget="1GB")


def launches_of(way: StripProfile) -> int:
    return way.batch_items * sum(stage.copies + sum(work.kernels for work in stage.work) for stage in way.stages)


def test_ways_are_in_the_footprint() -> None:
    (decode,) = (phase for phase in measure_footprint("sd-1.5", REQUEST).phases if phase.name == "decode")
    assert {way.feature_maps for way in decode.strip_options} == {"device", "host"}
    assert all(way.allocator_bytes < decode.allocator_bytes for way in decode.strip_options)
    on_device = [way for way in decode.strip_options if way.feature_maps == "device"]
    assert [way.allocator_bytes for way in on_device] == sorted(
        (way.allocator_bytes for way in on_device), reverse=True
    )
    launches = [launches_of(way) for way in on_device]
    assert launches == sorted(launches)


def test_a_call_that_asks_for_something_else_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    card_of(1200 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget="1200MiB", request=REQUEST, device="simulated:0")
    small = fitted.plan
    assert not called(fitted, pipe).notes
    assert fitted.plan is small
    larger = tightfit.Request(height=768, width=640, steps=4)
    with torch.no_grad():
        pipe(**call_arguments(pipe, Prompt("a fox", seed=0), larger) | {"output_type": "pt"})
    report = fitted.report()
    (note,) = (note for note in report.trace.notes if note.startswith("planned anew"))
    assert note.startswith("planned anew for 640×768")
    assert "(before: 256×256" in note
    assert "unet: " in note
    assert report.plan is fitted.plan is not small
    assert report.plan.request == larger
    assert max(phase.peak_bytes for phase in report.trace.phases) <= 1200 * MIB
    called(fitted, pipe)
    assert fitted.plan == small  # made once
    fitted.undo()
    assert type(pipe).__call__ is StableDiffusionPipeline.__call__


def test_a_budget_is_a_cap() -> None:
    """On a card with more memory, the allocator holds no more than the budget all the same."""
    card_of(4000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    fitted = tightfit.fit(pipe, budget="700MiB", request=REQUEST, device="simulated:0")
    hog = [torch.empty(MIB, dtype=torch.uint8, device="privateuseone:0") for _ in range(600)]
    with pytest.raises(torch.OutOfMemoryError, match="has a capacity of 682 MiB"):  # torch may map 18 MiB more
        hog += [torch.empty(MIB, dtype=torch.uint8, device="privateuseone:0") for _ in range(101)]
    fitted.undo()
    hog += [torch.empty(MIB, dtype=torch.uint8, device="privateuseone:0") for _ in range(101)]


@pytest.mark.slow
def test_what_cannot_be_planned_for_leaves_all_as_it_was() -> None:
    card_of(500 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget="300MiB", request=REQUEST, device="simulated:0")
    before = fitted.plan
    with pytest.raises(BudgetTooSmall, match="cannot do 1024×1024, 2 at once within 300 MiB"):
        pipe(["a fox", "an owl"], height=1024, width=1024)
    assert fitted.plan is before
    called(fitted, pipe)


def test_less_than_was_planned_for_is_not_planned_for_where_nothing_could_be_gained() -> None:
    card_of(8000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, request={"height": 512, "width": 512, "steps": 4}, device="simulated:0")
    assert fitted.plan.budget is None
    assert "95% of what was free" in fitted.plan.reasons[3].because
    before = fitted.plan
    assert not called(fitted, pipe).notes
    assert fitted.plan is before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": "a fox"}, {}),
        ({"prompt": ["a fox", "an owl"], "num_images_per_prompt": 2, "height": 64}, {"batch": 4, "height": 64}),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(3, 77, 8)},
            {"batch": 3, "arguments": {"prompt_embeds": "float32 3x77x8"}},
        ),
        ({"prompt": "a fox", "guidance_scale": 1.0, "num_inference_steps": 7}, {"guidance": 1.0, "steps": 7}),
        ({"prompt": "a fox", "clip_skip": 1, "eta": 0.5}, {"arguments": {"clip_skip": 1, "eta": 0.5}}),
        ({"prompt": "a fox", "return_dict": False, "output_type": "pt", "generator": None}, {}),
        (
            {"prompt": "a fox", "image": Image.new("RGB", (96, 64))},
            {"height": 64, "width": 96, "arguments": {"image": "RGB image 96x64"}},
        ),
        (
            {"prompt": "a fox", "image": [torch.zeros(3, 32, 48)]},
            {"height": 32, "width": 48, "arguments": {"image": "[float32 3x32x48]"}},
        ),
    ],
)
def test_what_a_call_asks_for(arguments: dict[str, Any], said: dict[str, Any]) -> None:
    kind = StableDiffusionImg2ImgPipeline if "image" in arguments else StableDiffusionPipeline
    pipe = object.__new__(kind)
    taken = {name: value for name, value in arguments.items() if name != "height" or "image" not in arguments}
    assert request_of(pipe, (), taken) == tightfit.Request(**said)


def test_what_else_a_call_says_decides_about_its_bytes_where_it_is_not_the_default() -> None:
    pipe = object.__new__(FluxPipeline)
    shapes = [
        shape_of(pipe, tightfit.Request(height=64, width=64, arguments=arguments))
        for arguments in ({}, {"max_sequence_length": 512, "true_cfg_scale": 1.0}, {"max_sequence_length": 256})
    ]
    assert shapes[0] == shapes[1] != shapes[2]
    few, many, more = (
        shape_of(pipe, tightfit.Request(height=64, width=64, arguments={"true_cfg_scale": scale}))
        for scale in (1.0, 3.5, 4)
    )
    assert few == shapes[0]
    assert few != many == more, "a scale only switches another pass on"


@pytest.mark.parametrize(
    "video",
    [
        [Image.new("RGB", (96, 64))] * 9,
        [torch.zeros(9, 3, 64, 96)],
        torch.zeros(1, 9, 3, 64, 96),
    ],
    ids=["pictures", "a clip in a list", "a batch of clips"],
)
def test_a_call_that_starts_from_a_clip_asks_for_its_frames(video: Any) -> None:
    pipe = object.__new__(CogVideoXVideoToVideoPipeline)
    asked = request_of(pipe, (), {"prompt": "a fox", "video": video})
    assert asked is not None
    assert (asked.height, asked.width, asked.frames) == (64, 96, 9)


def test_what_no_request_can_say_is_left_to_the_pipeline() -> None:
    pipe = object.__new__(StableDiffusionPipeline)
    asked = request_of(pipe, (), {"prompt": "a fox", "height": -5})
    assert asked == tightfit.Request(arguments={"height": -5})
    assert request_of(object.__new__(FluxPipeline), (), {"promt": "a fox"}) is None


def test_on_a_cpu_calls_are_planned_for_too() -> None:
    """Without numbers that mean much: what this process holds depends on the tests before."""
    case = TINY[0]
    pipe = case.make()
    untouched = run(pipe, case)
    fitted = tightfit.fit(pipe, ram="20GB", device="cpu", request={"height": 32, "width": 32, "steps": 2})
    assert {part.placement for part in fitted.plan.components.values()} <= {"resident", "offload"}
    assert torch.equal(run(pipe, case), untouched)
    with pytest.raises(BudgetTooSmall, match=r"within 95.4 MiB, while this process holds .* before anything is loaded"):
        tightfit.fit(pipe, ram="100MB", device="cpu", request={})
    assert torch.equal(run(pipe, case), untouched)


def test_a_setting_that_is_switched_is_planned_for() -> None:
    pipe = next(case for case in CASES if case.name == "StableDiffusion").make()
    fitted = tightfit.fit(pipe, budget="1GB", device="loopback")
    switches: list[tuple[Any, str]] = [
        (pipe.vae.enable_tiling, "vae"),
        (lambda: pipe.unet.set_attn_processor(AttnProcessor()), "unet"),
    ]
    run(pipe, CASES[0])
    for switch, name in switches:
        switch()
        run(pipe, CASES[0])
        assert f"{name} has other settings: planned anew" in fitted.report().trace.notes
        run(pipe, CASES[0])
        assert not [note for note in fitted.report().trace.notes if "settings" in note]


def test_an_attention_backend_of_the_process_is_planned_for() -> None:
    """Attention by plain products needs memory for its scores, fused attention none."""
    card_of(1000 * MIB, known_card("rtx3060"))
    pipe = next(case for case in TINY if case.name == "Flux").make()
    fitted = tightfit.fit(pipe, request=REQUEST, device="simulated:0")
    fused = called(fitted, pipe)
    with attention_backend("_native_math"):
        products = called(fitted, pipe)
        assert "diffusers' attention backend is _native_math: planned anew" in products.notes
        assert products.peak_bytes > 1.2 * fused.peak_bytes
        told = {phase.name: phase.peak_bytes for phase in fitted.plan.forecast}
        for phase in products.phases:
            assert phase.peak_bytes <= told[phase.name]
        assert not [note for note in called(fitted, pipe).notes if "backend" in note]
    native = called(fitted, pipe)
    assert "diffusers' attention backend is native: planned anew" in native.notes
    assert native.peak_bytes == fused.peak_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_memory_freed_in_a_call_goes_back_to_the_system_after_it() -> None:
    case = TINY[0]
    pipe = case.make()
    tightfit.fit(pipe, ram="20GB", device="cpu", request={"height": 32, "width": 32, "steps": 2})
    run(pipe, case)
    kept: list[Any] = []

    def fill(*_: Any) -> dict[str, Any]:
        """64 MiB of the heap in pieces, with something that stays between each two."""
        pieces = [(bytearray(64 * 2**10), bytearray(1024)) for _ in range(1024)]
        kept.extend(piece[1] for piece in pieces)
        return {}

    before = held_bytes()
    pipe(**case.call(), callback_on_step_end=fill)
    assert held_bytes() - before < 16 * MIB
