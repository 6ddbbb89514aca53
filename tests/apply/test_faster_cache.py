"""FasterCache: the same pictures as diffusers', what is left out of batches and of calls, and where nothing can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from apply.test_step_caches import BY_NAME, STEPS, denoiser, draw, draw_within, fit, kept, make
from tightfit.apply.activations.caches.faster_cache import HIGH_FROM, LOW_UNTIL
from tightfit.apply.activations.caches.step_counter import StepCounter
from tightfit.errors import PlanError
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.modules import find_blocks
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.argument_values import Given
from tightfit.run.call_arguments import request_of_example
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tiny_pipelines import PIXELS

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")  # in diffusers' FasterCache

BATCHES = ["StableDiffusion", "StableDiffusion3", "CogVideoX", "LTX"]  # one call for both predictions of a step
CALLS = ["Flux", "Wan"]  # a call for each


def faster(**fields: Any) -> dict[str, Any]:
    return {"strategy": "faster-cache", "warm_up": 2} | fields


def draw_by_diffusers(family: str, **config: Any) -> torch.Tensor:
    """The picture of diffusers' FasterCache, whose weights of frequencies are a function of the step."""
    from diffusers import FasterCacheConfig

    case = BY_NAME[family]
    pipe = make(case)

    def step() -> int:
        return pipe.scheduler.timesteps.tolist().index(int(pipe.current_timestep))

    def within(name: str) -> tuple[float, float]:  # timesteps of steps from a first one to a last one
        first, last = config.pop(name)
        pipe.scheduler.set_timesteps(STEPS)
        times = pipe.scheduler.timesteps.tolist()
        return times[last] - 0.5, times[first] + 0.5

    ranges = {
        "spatial_attention_timestep_skip_range": within("attention"),
        "unconditional_batch_timestep_skip_range": within("guidance"),
    }
    weight, low, high = (config.pop(name) for name in ("weight", "low", "high"))
    pipe.transformer.enable_cache(
        FasterCacheConfig(
            **ranges, **config, tensor_format="BFCHW", current_timestep_callback=lambda: pipe.current_timestep,
            attention_weight_callback=lambda _: weight,
            low_frequency_weight_callback=lambda _: low if step() < LOW_UNTIL * STEPS else 1.0,
            high_frequency_weight_callback=lambda _: high if step() >= HIGH_FROM * STEPS else 1.0,
        )
    )  # fmt: skip
    return draw(pipe, case)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_guidance_is_that_of_diffusers() -> None:
    """Both predictions in every third step from the third on, frequencies with other weights than the usual ones."""
    case = BY_NAME["CogVideoX"]
    wanted = draw_by_diffusers(
        "CogVideoX", guidance=(1, 7), attention=(0, 0), weight=0.0, low=1.2, high=1.3,
        unconditional_batch_skip_range=3,
    )  # fmt: skip
    pipe = make(case)
    fields = {"interval": 1, "guidance_interval": 3, "low_frequencies": 1.2, "high_frequencies": 1.3, "warm_up": 1}
    fitted = fit(pipe, faster(**fields))
    found = draw(pipe, case)
    assert kept(fitted).skipped_steps == (1, 2, 4, 5, 7)
    assert_same(found, wanted)
    fitted.undo()
    assert (draw(pipe, case) - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_step_is_that_of_diffusers(step: int) -> None:
    """Attention and guidance of one step, after two that were computed: diffusers also counts predicted outputs."""
    case = BY_NAME["CogVideoX"]
    wanted = draw_by_diffusers(
        "CogVideoX", guidance=(step, step), attention=(step, step), weight=0.3, low=1.1, high=1.1,
        unconditional_batch_skip_range=99,
    )  # fmt: skip
    pipe = make(case)
    found = draw_within(pipe, case, faster(skipped_steps=(step,), weight=0.3))
    assert_same(found, wanted)
    assert (draw(pipe, case) - wanted).abs().max() > 1e-3 * wanted.abs().max()


# two calls


def circle(height: int, width: int) -> torch.Tensor:
    """The low frequencies of a picture, as shifted to the middle of its spectrum."""
    down, across = torch.arange(height)[:, None] - height // 2, torch.arange(width)[None] - width // 2
    return down**2 + across**2 <= (min(height, width) // 5) ** 2


def by_formula(forward: Callable[..., Any], left_out: set[int], low: float, high: float) -> Callable[..., Any]:
    """A network's `forward`, whose second call in a step is replaced in the steps `left_out` (by equations 9 to 11)."""
    calls, kept = [0], {}

    def spectra(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if output.ndim == 3:  # a square picture, row by row
            side = math.isqrt(output.shape[1])
            output = output.unflatten(1, (side, side)).movedim(-1, 1)
        spectrum = torch.fft.fftshift(torch.fft.fft2(output.double()), dim=(-2, -1))
        inside = circle(*output.shape[-2:])
        return spectrum * inside, spectrum * ~inside

    def run(*args: Any, **kwargs: Any) -> Any:
        step, second = divmod(calls[0], 2)
        calls[0] += 1
        output = forward(*args, **kwargs)[0]
        if not second:
            kept["output"] = output
        elif step not in left_out:
            kept["differences"] = [one - two for one, two in zip(*map(spectra, (output, kept["output"])), strict=True)]
        else:
            factors = (low if step < LOW_UNTIL * STEPS else 1, high if step >= HIGH_FROM * STEPS else 1)
            kept["differences"] = [by * each for by, each in zip(factors, kept["differences"], strict=True)]
            parts = zip(kept["differences"], spectra(kept["output"]), strict=True)
            spectrum = sum(difference + other for difference, other in parts)
            whole = torch.fft.ifft2(torch.fft.ifftshift(spectrum, dim=(-2, -1))).real.float()
            output = whole if output.ndim > 3 else whole.movedim(1, -1).flatten(1, 2)
        return (output,)

    return run


@pytest.mark.parametrize("family", CALLS)
def test_a_call_that_is_left_out_is_that_of_the_formula(family: str) -> None:
    case = BY_NAME[family]
    pipe = make(case)
    plain = draw(pipe, case)
    pipe.transformer.forward = by_formula(pipe.transformer.forward, {1, 2, 4, 5, 7}, 1.2, 1.3)
    wanted = draw(pipe, case)
    del pipe.transformer.forward
    fields = {"interval": 1, "guidance_interval": 3, "low_frequencies": 1.2, "high_frequencies": 1.3, "warm_up": 1}
    fitted = fit(pipe, faster(**fields))
    assert_same(draw(pipe, case), wanted)
    assert kept(fitted).skipped_steps == (1, 2, 4, 5, 7)
    assert (plain - wanted).abs().max() > 1e-3 * wanted.abs().max()


# what runs


def rows_of_blocks(family: str, cache: dict[str, Any], **arguments: Any) -> tuple[list[int], list[int], Any]:
    """How many items the second block is given in each of its calls, those of its attention, and the report."""
    case = BY_NAME[family]
    pipe = make(case)
    block = list(find_blocks(getattr(pipe, denoiser(pipe))).values())[1]
    attention = next(part for part in block.modules() if hasattr(part, "processor"))
    found: tuple[list[int], list[int]] = ([], [])
    fitted = fit(pipe, cache)
    for rows, module in zip(found, (block, attention), strict=True):

        def note(_: Any, __: Any, output: Any, rows: list[int] = rows) -> None:
            rows.append(len(output if isinstance(output, torch.Tensor) else output[0]))

        module.register_forward_hook(note)
    draw(pipe, case, **arguments)
    return *found, fitted.report()


@pytest.mark.parametrize("family", ["StableDiffusion3", "CogVideoX", "LTX"])
def test_batches_are_halved(family: str) -> None:
    blocks, attention, report = rows_of_blocks(family, faster(skipped_steps=(3, 5)))
    assert blocks == [2, 2, 2, 1, 2, 1, 2, 2]
    assert attention == [2, 2, 2, 2, 2, 2]
    assert not report.trace.notes


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_left_out(family: str) -> None:
    blocks, attention, report = rows_of_blocks(family, faster(skipped_steps=(3, 5)))
    assert len(blocks) == 2 * STEPS - 2
    assert len(attention) == 2 * (STEPS - 2)
    assert not report.trace.notes


def test_steps_by_interval() -> None:
    """Both predictions in steps 0, 1, 4 and 7; of the others, attention is computed where one before it was not."""
    blocks, attention, _ = rows_of_blocks("CogVideoX", faster(guidance_interval=3))
    assert blocks == [2, 2, 1, 1, 2, 1, 1, 2]
    assert attention == [2, 2, 1, 2, 1, 2]


def test_attention_grows_over_the_steps() -> None:
    case = BY_NAME["CogVideoX"]
    pipe = make(case)
    growing = draw_within(pipe, case, faster(skipped_steps=(3,)))
    assert_same(growing, draw_within(pipe, case, faster(skipped_steps=(3,), weight=3 / 7)))
    constant = draw_within(pipe, case, faster(skipped_steps=(3,), weight=1.0))
    assert (growing - constant).abs().max() > 1e-5 * growing.abs().max()


# where guidance is computed in every step


def test_a_batch_of_two_pictures_is_not_halved() -> None:
    arguments = {"guidance_scale": 1.0, "num_images_per_prompt": 2}
    blocks, attention, report = rows_of_blocks("StableDiffusion3", faster(skipped_steps=(3, 5)), **arguments)
    assert blocks == [2] * STEPS
    assert attention == [2] * (STEPS - 2)
    assert not report.trace.notes


def test_an_interval_of_one_computes_both() -> None:
    blocks, attention, _ = rows_of_blocks("CogVideoX", faster(guidance_interval=1))
    assert blocks == [2] * STEPS
    assert len(attention) == STEPS - 3  # steps 2, 4 and 6 predict it


@pytest.mark.parametrize(
    ("family", "field"), [("StableDiffusion3", {"cfg": "sequential"}), ("Flux", {"cfg": "batched"})]
)
def test_batches_that_the_plan_splits_or_joins(family: str, field: dict[str, Any]) -> None:
    case = BY_NAME[family]
    pipe = make(case)
    wanted = draw_within(pipe, case, faster(skipped_steps=(), interval=2), **field)
    fitted = fit(pipe, faster(skipped_steps=(3, 5)), **field)
    found = draw(pipe, case)
    assert 0 < (found - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert "both guidance predictions are computed in every step: the plan splits" in str(fitted.report().trace.notes)


def test_calls_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is predicted in both, and the report says why both are computed."""
    monkeypatch.setattr(StepCounter, "naming", lambda _, original: original)
    blocks, attention, report = rows_of_blocks("Wan", faster(skipped_steps=(3, 5)))
    assert len(blocks) == 2 * STEPS
    assert len(attention) == 2 * (STEPS - 2)
    assert "its calls are not named after the predictions" in str(report.trace.notes)


def test_networks_without_attention_are_refused() -> None:
    network = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, add_attention=False,
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(network, diffusers.DDPMScheduler())
    with pytest.raises(PlanError, match="unet has no attention layers"):
        fit(pipe, faster())


# on simulated cards


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", [*BATCHES, *CALLS])
@pytest.mark.parametrize(
    "cache", [faster(guidance_interval=3), {"strategy": "pab"}], ids=lambda cache: cache["strategy"]
)
def test_a_simulated_call_skips_the_same_steps(family: str, cache: dict[str, Any]) -> None:
    """Also where calls are repeated instead of simulated: each leaves out what that of the CPU does."""
    case = BY_NAME[family]
    pipe = make(case)
    arguments = case.call(PIXELS) | {"num_inference_steps": 20}
    with unlimited_card(ANY_CARD) as card:
        plan = {"components": {denoiser(pipe): {"cache": cache}}}
        simulation = SimulationRun(meta_copy(pipe), card, plan, request_of_example(pipe, arguments))
        simulation.run(Given(arguments, torch.device("cpu")))
        predicted = kept(simulation.fitted)
    fitted = fit(pipe, cache)
    draw(pipe, case, num_inference_steps=20)
    assert kept(fitted) == predicted
    assert len(predicted.skipped_steps) > 5


@pytest.mark.parametrize("strategy", ["pab", "faster-cache"])
def test_layers_that_run_several_times_in_a_call(strategy: str) -> None:
    """Blocks that take the batch in parts: each part has its own attention outputs."""
    case = BY_NAME["StableDiffusion"]
    pipe = make(case)
    cache = {"strategy": strategy, "skipped_steps": (3, 5)}
    if strategy == "faster-cache":
        cache["guidance_interval"] = 1
    wanted = draw_within(pipe, case, cache, max_batch=1)
    streamed = {"placement": "stream", "weight_memory": "100KB", "device": "loopback"}
    found = draw_within(pipe, case, cache, max_batch=1, **streamed)
    assert_same(found, wanted)
