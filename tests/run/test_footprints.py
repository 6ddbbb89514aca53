"""Footprints: the true order of units, work as counted elsewhere, and one answer however the question is put."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tightfit
from a_few import a_few
from tightfit import Request, fit, measure_footprint
from tightfit.catalog.known import known_card, known_model, model_names
from tightfit.errors import InputError, PlanError, RequestError
from tightfit.measure.meta_copy import fingerprint
from tightfit.measure.modules import find_blocks, find_components
from tightfit.run import footprints
from tightfit.run.footprints import Measurer
from tightfit.run.pass_replay import PassReplayer
from tightfit.run.simulate import simulate_call
from tightfit.schema.footprint import Footprint, Phase
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors
from tiny_pipelines import CASES, TinyCase, run

every_case = pytest.mark.parametrize(
    "case", a_few(CASES, "StableDiffusionInpaint", "StableDiffusionXL", "Flux", "WanImageToVideo")
)
_REQUESTED = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}


@pytest.fixture(autouse=True)
def _own_cache(new_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache()))


def named(name: str) -> TinyCase:
    return next(case for case in CASES if case.name == name)


def measured(pipe: Any, case: TinyCase) -> Footprint:
    """With the same arguments as the case's call."""
    call = case.call()
    request = Request(**{ours: call.pop(theirs) for theirs, ours in _REQUESTED.items() if theirs in call})
    return measure_footprint(pipe, request, inputs={k: v for k, v in call.items() if k != "output_type"})


def uses(footprint: Footprint) -> list[str]:
    """Every unit's turn, in order."""
    return [
        f"{done.component}.{use.block}"
        for phase in footprint.phases
        for done in (phase.calls[index] for index in phase.call_order)
        for use in done.block_uses
        if use.block
    ]


def seen(pipe: Any, undo: ExitStack) -> list[str]:
    """Every unit's turn as it comes while `pipe` is called."""
    turns: list[str] = []
    for name, module in find_components(pipe).items():
        for path, block in find_blocks(module).items():
            note = lambda *_, turn=f"{name}.{path}": turns.append(turn)  # noqa: E731
            undo.callback(block.register_forward_pre_hook(note).remove)
    return turns


@pytest.mark.one_in(4)
@every_case
def test_units_are_in_their_true_order(case: TinyCase) -> None:
    pipe = case.make()
    footprint = measured(pipe, case)
    with ExitStack() as undo:
        turns = seen(pipe, undo)
        run(pipe, case)
    assert uses(footprint) == turns
    used = {turn.partition(".")[0] for turn in turns}
    for component in footprint.components:
        blocks = {f"{component.name}.{block.name}" for block in component.blocks if block.name}
        for phase in footprint.phases:
            if component.name in {done.component for done in phase.calls}:
                turned = {f"{d.component}.{u.block}" for d in phase.calls for u in d.block_uses}
                assert set(phase.unused_blocks) & blocks == blocks - turned
        assert component.bytes == sum(block.bytes for block in component.blocks) or component.name not in used
        assert all(sum(block.dtypes.values()) == block.bytes for block in component.blocks)


@pytest.mark.one_in(4)
@every_case
def test_measuring_leaves_the_pipeline_as_it_was(case: TinyCase) -> None:
    pipe = case.make()
    before = copy.deepcopy({name: part.state_dict() for name, part in find_components(pipe).items()})
    config, attributes = dict(pipe.config), {n: dict(vars(p)) for n, p in find_components(pipe).items()}
    measured(pipe, case)
    assert dict(pipe.config) == config
    for name, part in find_components(pipe).items():
        assert vars(part) == attributes[name]
        assert all(torch.equal(value, before[name][key]) for key, value in part.state_dict().items())


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux", "Wan"])
def test_arithmetic_is_what_torch_counts_in_a_run(name: str) -> None:
    case = named(name)
    pipe = case.make()
    footprint = measured(pipe, case)
    # torch's counter has no formula for the CPU's attention kernels: the math path shows it the products
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        run(pipe, case)
    assert operations(footprint.phases) == counter.get_total_flops()


def operations(phases: tuple[Phase, ...]) -> int:
    inside = sum(
        work.operations * done.runs
        for phase in phases
        for done in phase.calls
        for use in done.block_uses
        for work in use.work
    )
    return inside + sum(work.operations for phase in phases for work in phase.other_work)


@pytest.mark.slow
def test_steps_that_are_not_worked_through_are_like_those_that_are(
    monkeypatch: pytest.MonkeyPatch, new_cache: Callable[..., Path]
) -> None:
    request = {"steps": 5, "height": 256, "width": 256}
    short = measure_footprint("sd-1.5", request)
    monkeypatch.setattr(PassReplayer, "__call__", lambda self, *args, **kwargs: self._forward(*args, **kwargs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache()))
    whole = measure_footprint("sd-1.5", request)
    for quick, full in zip(short.phases, whole.phases, strict=True):
        assert quick.allocator_bytes == pytest.approx(
            full.allocator_bytes, abs=2**20
        )  # what passes hold only for a moment is replayed once
        assert quick.model_copy(update={"allocator_bytes": full.allocator_bytes}) == full
    assert short.components == whole.components
    assert [done.runs for phase in short.phases for done in phase.calls] == [2, 6, 1]  # PNDM looks at one step twice


@pytest.mark.parametrize("model", a_few(["sd-1.5", "wan-2.1-1.3b"], "sd-1.5"))
def test_peaks_are_those_of_a_rehearsal(model: str) -> None:
    asked = Request(steps=2, height=128, width=128)
    footprint = Measurer(model).measure(asked, None, lambda _: ())  # strips of a clip of 81 frames take minutes
    trace = simulate_call(model, known_card("rtx3060"), {"level": 0}, asked).trace
    workspace = 8_519_680
    assert [phase.name for phase in footprint.phases] == [phase.name for phase in trace.phases]
    for phase, told in zip(footprint.phases, trace.phases, strict=True):
        # the rehearsal's weights are counted as they are, the allocator's blocks are a little larger
        blocks = told.peak_bytes - told.peak_weights - phase.peak
        assert workspace - 2**16 <= blocks <= workspace + 0.02 * told.peak_weights


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_every_known_model_runs_from_encode_to_decode(name: str) -> None:
    footprint = measure_footprint(name, {"steps": min(3, known_model(name).request.steps or 3)})  # Sana-Sprint: two
    assert [phase.name for phase in footprint.phases] == ["encode", "denoise", "decode"]
    worked = {done.component for phase in footprint.phases for done in phase.calls}
    assert worked <= {component.name for component in footprint.components}
    assert all(phase.peak >= max(done.peak for done in phase.calls) > 0 for phase in footprint.phases)


def test_a_folder_is_as_its_live_pipeline(tiny_model: Path) -> None:
    request = {"steps": 3, "height": 64, "width": 64, "batch": 2}
    folder = measure_footprint(tiny_model, request)
    live = measure_footprint(diffusers.DiffusionPipeline.from_pretrained(tiny_model), request)
    assert live.phases == folder.phases
    assert live.components == folder.components


def test_one_call_of_a_network() -> None:
    vae = named("StableDiffusion").make().vae
    footprint = measure_footprint(vae.decode, inputs=[(1, 4, 16, 16)])
    (phase,) = footprint.phases
    assert (phase.name, phase.call_order) == ("decode", (0,))
    assert all(name.startswith("model.encoder.") for name in phase.unused_blocks)
    doubled = measure_footprint(vae.decode, inputs={"z": torch.empty(2, 4, 16, 16, device="meta")})
    assert operations(doubled.phases) == 2 * operations(footprint.phases)
    assert footprint.activation_peak < doubled.activation_peak < 2 * footprint.activation_peak  # weights' copies stay
    with_meaning = measure_footprint(vae.decode, inputs=[torch.randn(1, 4, 16, 16)])
    assert with_meaning == footprint


class Choosy(nn.Module):
    """Leaves its second block out when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.blocks[2](self.blocks[0](x))
        return x


def test_a_module_of_ones_own_with_skipped_and_repeated_blocks() -> None:
    (phase,) = measure_footprint(Choosy(), inputs={"x": (4, 8), "times": 2}).phases
    assert [use.block for use in phase.calls[0].block_uses] == ["blocks.0", "blocks.2"] * 2
    assert phase.unused_blocks == ("model.blocks.1",)
    (work,) = phase.calls[0].block_uses[0].work
    assert (work.kind, work.dtype, work.kernels) == ("matmul", "float32", 1)
    assert work.operations == 2 * 4 * 8 * 8
    assert work.traffic == 4 * (4 * 8 + 8 * 8 + 8 + 4 * 8)


class Asking(nn.Module):
    """Looks at a number between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if float(torch.ones(1, device=x.device)) else x


def test_where_the_host_waits_for_the_device_is_known() -> None:
    (phase,) = measure_footprint(Asking(), inputs={"x": (4, 8)}).phases
    turns = [(turn.layer, turn.host_waits) for use in phase.calls[0].block_uses for turn in use.layer_work]
    assert [layer for layer, waits in turns if waits] == [""]
    assert turns.index(("first", False)) < turns.index(("", True)) < turns.index(("second", False))


class SkippingLayers(diffusers.StableDiffusion3Pipeline):  # type: ignore[misc]
    """Leaves the first block out in half of its passes."""

    @functools.wraps(diffusers.StableDiffusion3Pipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skipping = {"skip_guidance_layers": [0], "skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 1.0}
        return super().__call__(*args, **kwargs, **skipping)


def test_units_that_only_some_passes_use_are_conditional() -> None:
    made = named("StableDiffusion3").make()
    pipe = SkippingLayers(**made.components)
    footprint = measured(pipe, named("StableDiffusion3"))
    (denoise,) = (phase for phase in footprint.phases if phase.name == "denoise")
    assert denoise.conditional_blocks == ("transformer.transformer_blocks.0",)
    assert denoise.call_order == (0, 1) * (len(denoise.call_order) // 2)


def test_the_answer_is_kept_under_all_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    measure = footprints._measure_call

    @functools.cache
    def once() -> Any:
        return measure(*asked[0])

    monkeypatch.setattr(footprints, "_measure_call", lambda *a, **_: [asked.append(a), once()][1])
    request = {"steps": 2, "height": 64, "width": 64}
    make = named("StableDiffusion").make
    first = measure_footprint(make(), request)
    assert measure_footprint(make(), request) == first
    assert len(asked) == 1
    sliced = make()
    sliced.vae.use_slicing = True
    measure_footprint(sliced, request)
    measure_footprint(make(), request | {"batch": 2})
    assert len(asked) == 3


def test_what_may_change_unseen_has_no_mark() -> None:
    make = named("StableDiffusion").make
    assert fingerprint(make()) == fingerprint(make()) != ""
    hooked = make()
    hooked.unet.register_forward_hook(lambda *_: None)
    own = make()
    own.unet.mid_block.resnets[0].nonlinearity = Choosy()
    half = make().to(torch.float16)
    assert fingerprint(hooked) == fingerprint(own) == ""
    assert fingerprint(half) not in ("", fingerprint(make()))


@pytest.mark.parametrize("name", ["StableDiffusionXL", "StableDiffusion3", "Wan", "LTX"])
def test_what_calls_leave_behind_is_no_other_pipeline(name: str) -> None:
    """Schedulers' steps, transformers' own hooks, what the last call asked for."""
    case = named(name)
    pipe = case.make()
    before = fingerprint(pipe)
    run(pipe, case)
    assert fingerprint(pipe) == before != ""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, num_train_timesteps=77)
    pipe.scheduler = scheduler
    assert fingerprint(pipe) not in ("", before)


def refusals() -> Iterator[tuple[Any, Mapping[str, Any], type[Exception], str]]:
    yield "flux.1-dve", {}, InputError, "did you mean 'flux.1-dev'?"
    yield Path("/no/such/folder"), {}, InputError, "/no/such/folder"
    yield 5, {}, PlanError, "tightfit takes a diffusers pipeline or a torch.nn.Module, not int"
    yield Choosy(), {}, InputError, r"give inputs, e\.g\. inputs=\[\(1, 4, 64, 64\)\]"
    yield Choosy(), {"request": {"steps": 3}, "inputs": [(4, 8)]}, InputError, "a single Choosy has no request"
    yield "sd-1.5", {"request": {"stepps": 3}}, RequestError, "did you mean 'steps'?"
    yield "sd-1.5", {"inputs": [(4, 8)]}, InputError, "a pipeline's inputs go by name, not as list"


AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import torch
from tightfit import measure_footprint

start = Barrier(3)

def measured(width, wait=lambda: None):
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(20)))
    wait()
    return measure_footprint(network, inputs=[(4, width)])

widths = (16, 64, 256)
with ThreadPoolExecutor(3) as pool:
    together = list(pool.map(lambda width: measured(width, start.wait), widths))
assert together == [measured(width) for width in widths]
"""


def test_three_threads_that_measure_first() -> None:
    """All but one failed, or measured on another one's card."""
    command = [sys.executable, "-W", "ignore", "-c", AT_ONCE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("subject", "options", "error", "message"), [*refusals()])
def test_what_cannot_be_measured_says_why(subject: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        measure_footprint(subject, **options)


def test_a_fitted_pipeline_cannot_be_measured() -> None:
    pipe = named("StableDiffusion").make()
    fitted = fit(pipe, level=0, device="cpu")
    with pytest.raises(PlanError, match=r"undo\(\) first"):
        measure_footprint(pipe)
    fitted.undo()
    assert measured(pipe, named("StableDiffusion")).phases


def test_a_clip_to_start_from_needs_a_length() -> None:
    with pytest.raises(RequestError, match="say of how many frames"):
        measure_footprint(named("CogVideoXVideoToVideo").make())
    assert tightfit.measure_footprint is measure_footprint


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("FluxImg2Img", None),
        ("CogVideoXImageToVideo", 9),
        pytest.param("StableDiffusionImg2Img", None, marks=pytest.mark.slow),
        pytest.param("StableDiffusionInpaint", None, marks=pytest.mark.slow),
        pytest.param("CogVideoXVideoToVideo", 9, marks=pytest.mark.slow),
        pytest.param("LTXImageToVideo", 9, marks=pytest.mark.slow),
    ],
)
def test_pictures_to_start_from_are_stood_in_for(name: str, frames: int | None) -> None:
    pipe = named(name).make()
    small, large = (
        measure_footprint(pipe, Request(height=side, width=side, frames=frames, steps=2)) for side in (64, 128)
    )
    phases = [phase.name for phase in small.phases]
    assert phases.index("denoise") > phases.index("encode")
    autoencoded = [phase for phase in small.phases if phase.name == "encode inputs"]
    kinds = {(done.component, done.method) for phase in autoencoded for done in phase.calls}
    assert kinds == {("vae", "encode")}  # alone, so that it can be measured in strips
    assert small.phases[-1].peak < large.phases[-1].peak


def test_nothing_of_a_measured_call_stays() -> None:
    """Tensors on a simulated card are known by address, and their card must not keep them alive."""
    pipe = named("StableDiffusion").make()
    free_dead_tensors()
    before = cards()
    for side in (64, 96):
        measure_footprint(pipe, Request(height=side, width=side))
    assert cards() == before


def cards() -> int:
    gc.collect()
    free_dead_tensors()
    gc.collect()
    return sum(type(each) is SimulatedCard for each in gc.get_objects())
