"""Parts of a split network that work at the same time, on chunks of a batch: the numbers of one card, sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightfit
from more_pipelines import MORE_CASES
from simulator.conftest import ACCELERATOR
from tightfit import PlanError, Request, measure_footprint
from tightfit.apply.device_maps import hf_device_map
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.modules import find_blocks, has_skips
from tightfit.plan.network_parts import block_order
from tightfit.run.simulate import SimulationRun
from tightfit.schema.plan import Plan
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

ONE, OTHER, THIRD = "simulated:0", "simulated:1", "simulated:2"
SLOW = {"arithmetic_rates": {"float32": 1e9}, "memory_rate": 1e9, "launch_overhead": 0.0}  # tiny networks take long
BATCHED = ("StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "CogVideoX", "LTX")  # guidance in one call


@pytest.fixture(autouse=True)
def cards() -> Any:
    host, like = Host(), ACCELERATOR.model_copy(update=SLOW)
    made = [SimulatedCard(index, like, host, values="real") for index in range(3)]
    use_cards(made)
    yield made
    use_cards([])


def case_of(name: str) -> TinyCase:
    return next(case for case in (*CASES, *MORE_CASES) if case.name == name)


def denoiser_of(pipe: Any) -> str:
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def after_blocks(case: TinyCase) -> tuple[str, ...]:
    footprint = measure_footprint(case.make(), Request(height=64, width=64, steps=2))
    use_cards([])
    (phase,) = (footprint.phases[index] for index in footprint.denoiser_phases)
    return phase.calls[0].after_blocks


AFTER = {
    "StableDiffusion": ("conv_norm_out", "conv_act", "conv_out"),
    "StableDiffusionXL": ("conv_norm_out", "conv_act", "conv_out"),
    "StableDiffusion3": ("norm_out", "proj_out"),
    "CogVideoX": ("norm_final", "norm_out", "proj_out"),
    "LTX": ("norm_out", "proj_out"),
    "Wan": ("norm_out", "proj_out"),
}


def parts_of(pipe: Any, name: str, *places: float, devices: tuple[str, ...] = (OTHER, THIRD)) -> dict[str, Any]:
    """Fields that split the denoiser at these shares of its blocks, with what runs after them on the last device."""
    network = getattr(pipe, denoiser_of(pipe))
    order = block_order(find_blocks(network), has_skips=has_skips(network))
    firsts = [{"first": order[max(int(place * len(order)), 1)]} for place in places]
    firsts[-1]["outside"] = AFTER[name]
    return {"split": dict(zip(devices, firsts, strict=False))}


def played(case: TinyCase, fields: dict[str, Any]) -> tuple[torch.Tensor, float, Any]:
    """The pictures of two calls, which are equal; seconds of the second one's denoising; the fitted pipeline."""
    pipe = case.make()
    fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {denoiser_of(pipe): fields}})
    first, second = (run(pipe, case).cpu() for _ in range(2))
    assert torch.equal(first, second)
    seconds = {phase.name: phase.seconds for phase in fitted.report().trace.phases}
    return first, seconds["denoise"], fitted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", ["resident", "offload"])
@pytest.mark.parametrize("name", BATCHED)
def test_the_numbers_are_those_of_one_card_that_works_in_chunks(name: str, placement: str) -> None:
    case = case_of(name)
    wanted, seconds, _ = played(case, {"cfg": "sequential"})
    fields = {"cfg": "sequential", "placement": placement, **parts_of(case.make(), name, 0.5)}
    found, sooner, fitted = played(case, fields)
    assert torch.equal(found, wanted)
    assert sooner < seconds
    fitted.undo()


def test_modules_after_the_last_block_are_known_from_the_call() -> None:
    for name in ("StableDiffusion", "StableDiffusion3", "CogVideoX"):
        assert after_blocks(case_of(name)) == AFTER[name]


def test_two_cards_work_at_the_same_time() -> None:
    """Of two chunks, with a third of the blocks and two thirds: (1/3 + 2/3 + 2/3) / 2 of the time of one card."""
    case = case_of("StableDiffusion3")
    assert len(find_blocks(case.make().transformer)) == 3
    _, alone, _ = played(case, {"cfg": "sequential"})
    _, turns, _ = played(case, {"cfg": "sequential", "split": {OTHER: "transformer_blocks.1"}})
    _, sooner, _ = played(case, {"cfg": "sequential", **parts_of(case.make(), "StableDiffusion3", 0.5)})
    assert turns >= alone
    assert 0.75 * alone < sooner < 0.85 * alone


def test_three_cards_and_single_items_of_a_batch() -> None:
    case = case_of("StableDiffusion3")
    pipe = case.make()
    fields: dict[str, Any] = {"max_batch": 1}
    found, seconds = [], []
    for parts in ({}, parts_of(pipe, "StableDiffusion3", 0.34), parts_of(pipe, "StableDiffusion3", 0.34, 0.67)):
        fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": fields | parts}})
        for _ in range(2):
            made = pipe("a fox", num_images_per_prompt=2, generator=torch.Generator().manual_seed(1), **SIZE).images
        found.append(made.cpu())
        seconds.append({phase.name: phase.seconds for phase in fitted.report().trace.phases}["denoise"])
        fitted.undo()
    assert all(torch.equal(each, found[0]) for each in found)
    assert seconds[0] > seconds[1] > seconds[2]
    # of four chunks through three equal parts: (1 + 3 / 3) / 4 = half of the time of one card
    assert 0.4 * seconds[0] < seconds[2] < 0.6 * seconds[0]


SIZE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pt", "guidance_scale": 4.0}


def test_the_two_calls_of_a_step_at_the_same_time() -> None:
    """Wan calls its denoiser twice in a step: as one call of two chunks, from the second step on."""
    case = case_of("Wan")
    pipe = case.make()
    parts = parts_of(pipe, "Wan", 0.5)
    found, seconds = [], []
    for fields in ({}, {"cfg": "batched", "max_batch": 1, **parts}):
        fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": fields}})
        for _ in range(2):
            made = pipe(
                "a fox", num_frames=5, generator=torch.Generator().manual_seed(1), **SIZE | {"num_inference_steps": 20}
            )
        found.append(torch.as_tensor(made.frames).cpu())
        report = fitted.report().trace
        seconds.append(next(phase.seconds for phase in report.phases if phase.name == "denoise"))
        assert not report.notes
        fitted.undo()
    assert torch.equal(*found)
    assert seconds[1] < 0.93 * seconds[0]  # (1 + 20 * 5 / 6) / 20: of three blocks, one is on the first card


def test_calls_are_known_to_be_pairs() -> None:
    for name, paired in {"Wan": True, "StableDiffusion3": False, "Flux": False}.items():
        footprint = measure_footprint(case_of(name).make(), Request(height=64, width=64, steps=2))
        (phase,) = (footprint.phases[index] for index in footprint.denoiser_phases)
        assert [call.paired for call in phase.calls] == [paired], name


def test_another_size_and_undo() -> None:
    case = case_of("StableDiffusion")
    pipe = case.make()
    before = {path: (weight.clone(), id(weight)) for path, weight in pipe.unet.named_parameters()}
    chunks = tightfit.fit(pipe, plan={"device": ONE, "components": {"unet": {"cfg": "sequential"}}})
    wanted = [run(pipe, case, height).cpu() for height in (64, 96, 64)]
    chunks.undo()
    fields = {"cfg": "sequential", **parts_of(pipe, "StableDiffusion", 0.5)}
    fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {"unet": fields}})
    found = [run(pipe, case, height).cpu() for height in (64, 96, 64)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    where = {path.split(".")[0]: weight.device.index for path, weight in pipe.unet.named_parameters()}
    assert (where["conv_in"], where["time_embedding"], where["conv_norm_out"], where["conv_out"]) == (0, 0, 1, 1)
    assert hf_device_map(fitted.plan, pipe)["unet.conv_out"] == OTHER
    fitted.undo()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in pipe.unet.modules())
    for path, weight in pipe.unet.named_parameters():
        assert torch.equal(weight, before[path][0])
        assert id(weight) == before[path][1]


def test_a_module_that_is_not_outside_of_blocks_is_refused() -> None:
    pipe = case_of("StableDiffusion3").make()
    split = {OTHER: {"first": "transformer_blocks.1", "outside": ["proj_outt"]}}
    with pytest.raises(PlanError, match="outside of blocks 'proj_outt': did you mean 'proj_out'"):
        tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": {"split": split}}})


def test_repeated_steps_of_a_simulated_call_take_as_long_as_the_first_ones(cards: Any) -> None:
    """A simulated call repeats recorded denoiser calls: of parts on two cards, until the later card is done."""
    pipe = case_of("StableDiffusion3").make()
    fields = {"cfg": "sequential", **parts_of(pipe, "StableDiffusion3", 0.5)}
    seconds = {}
    for steps in (2, 3, 5):
        host, like = Host(), ACCELERATOR.model_copy(update=SLOW)
        two = [SimulatedCard(index, like, host) for index in range(2)]
        use_cards(two)
        plan = Plan.from_mapping({"device": ONE, "components": {"transformer": fields}})
        simulated = SimulationRun(meta_copy(pipe), two[0], plan, Request(height=64, width=64, steps=steps))
        simulated.run()
        phases = simulated.fitted.report().trace.phases
        seconds[steps] = next(phase.seconds for phase in phases if phase.name == "denoise")
    assert seconds[3] - seconds[2] == pytest.approx(seconds[2] / 2, rel=0.05)
    assert (seconds[5] - seconds[3]) / 2 == pytest.approx(seconds[3] - seconds[2], rel=0.01)
