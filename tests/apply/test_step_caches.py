"""Step caches on tiny pipelines: what is skipped, what is kept, and that nothing changes where nothing is skipped."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import tightfit
from tightfit.errors import PlanError, RunError
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.modules import find_blocks
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.argument_values import Given
from tightfit.run.call_arguments import request_of_example
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.plan import Plan
from tightfit.schema.results import PhaseTrace
from tightfit.schema.step_cache import STRATEGIES, CacheTrace, StepCache
from tiny_pipelines import CASES, PIXELS, TinyCase

BY_NAME = {case.name: case for case in CASES}
STEPS = 8
FAMILIES = ["StableDiffusion", "StableDiffusion3", "Flux", "CogVideoX", "Wan", "LTX"]
TRANSFORMERS = [name for name in FAMILIES if name != "StableDiffusion"]
FOR_TRANSFORMERS = ("teacache", "sea-cache", "blockdance")  # with their usual settings
WITHIN_BLOCKS = ("pab", "faster-cache")  # which leave out parts of blocks
SETTINGS: dict[str, dict[str, Any]] = {
    "magcache": {"magnitudes": [1.0] * STEPS, "first_blocks": 1},
    "dual-block": {"first_blocks": 1, "warm_up": 1},
    "blockdance": {"last_blocks": 1, "warm_up": 2},
    "faster-cache": {"warm_up": 2},
    "taylorseer": {"interval": 3, "warm_up": 2, "order": 2},
    "taylorseer-lite": {"interval": 3, "warm_up": 2, "order": 2},
}


def settings(strategy: str, **more: Any) -> dict[str, Any]:
    return {"strategy": strategy} | SETTINGS.get(strategy, {}) | more


def denoiser(pipe: Any) -> str:
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def make(case: TinyCase) -> Any:
    pipe = case.make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, case: TinyCase, **more: Any) -> torch.Tensor:
    arguments = case.call(PIXELS) | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}
    pictures: torch.Tensor = pipe(**arguments | more)[0]
    return pictures.float()


def fit(pipe: Any, cache: dict[str, Any] | None, **fields: Any) -> Any:
    device = fields.pop("device", "cpu")
    return tightfit.fit(pipe, plan={"device": device, "components": {denoiser(pipe): {"cache": cache} | fields}})


def kept(fitted: Any) -> CacheTrace:
    (found,) = fitted.report().trace.caches
    return found


def strategies_of(family: str) -> list[str]:
    return [name for name in STRATEGIES if family in TRANSFORMERS or name not in FOR_TRANSFORMERS]


EVERY = [(family, strategy) for family in FAMILIES for strategy in strategies_of(family)]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("family", "strategy"), EVERY)
def test_nothing_changes_where_no_step_is_skipped(family: str, strategy: str) -> None:
    case = BY_NAME[family]
    pipe = make(case)
    wanted = draw(pipe, case)
    more = {} if STRATEGIES[strategy].lossless else {"skipped_steps": ()}
    fitted = fit(pipe, settings(strategy, **more))
    assert torch.equal(draw(pipe, case), wanted)
    assert not kept(fitted).skipped_steps
    assert fitted.report().lossless
    fitted.undo()
    assert torch.equal(draw(pipe, case), wanted)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("family", "strategy"), [each for each in EVERY if not STRATEGIES[each[1]].lossless])
def test_the_steps_named_are_skipped(family: str, strategy: str) -> None:
    """Twice the same; blocks of skipped steps do not run; the picture is near that of all steps, and not equal."""
    case = BY_NAME[family]
    pipe = make(case)
    wanted = draw(pipe, case)
    runs = [0]
    network = getattr(pipe, denoiser(pipe))
    watched = network.mid_block if denoiser(pipe) == "unet" else list(find_blocks(network).values())[1]
    fitted = fit(pipe, settings(strategy, skipped_steps=(3, 5)))
    watched.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    first = draw(pipe, case)
    calls = runs[0]
    assert kept(fitted).skipped_steps == (3, 5)
    assert torch.equal(first, draw(pipe, case))
    assert not torch.equal(first, wanted)
    assert (first - wanted).abs().max() < 0.5 * wanted.abs().max()
    fitted.undo()
    runs[0] = 0
    assert torch.equal(draw(pipe, case), wanted)
    if strategy not in WITHIN_BLOCKS:
        assert calls * STEPS == runs[0] * (STEPS - 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["Flux", "CogVideoX", "Wan", "LTX"])
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3])
def test_first_block_skips_the_steps_that_diffusers_skips(family: str, threshold: float) -> None:
    """diffusers' FirstBlockCache, with the same threshold: the same picture, of the same steps."""
    from diffusers.hooks import FirstBlockCacheConfig

    case = BY_NAME[family]
    theirs = make(case)
    theirs.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    wanted = draw(theirs, case)
    pipe = make(case)
    fitted = fit(pipe, {"strategy": "first-block", "threshold": threshold})
    assert torch.allclose(draw(pipe, case), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    if threshold == 0.3:
        assert kept(fitted).skipped_steps


@pytest.mark.parametrize("family", ["Flux", "CogVideoX", "Wan", "LTX"])
@pytest.mark.parametrize(("interval", "order"), [(2, 1), (3, 2)])
def test_taylorseer_lite_predicts_what_diffusers_predicts(family: str, interval: int, order: int) -> None:
    """diffusers' TaylorSeer in its lite mode, in the same steps: it counts them from one after its warm-up."""
    from diffusers.hooks import TaylorSeerCacheConfig

    case, warm_up = BY_NAME[family], 3
    theirs = make(case)
    theirs.transformer.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=interval, disable_cache_before_step=warm_up, max_order=order, use_lite_mode=True,
            taylor_factors_dtype=torch.float32,
        )
    )  # fmt: skip
    runs = [0]
    queries = next(layer for name, layer in theirs.transformer.named_modules() if name.endswith("to_q"))
    queries.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    wanted = draw(theirs, case)
    skipped = tuple(step for step in range(warm_up, STEPS) if (step - warm_up - 1) % interval)
    branches = 1 if family in ("CogVideoX", "LTX") else 2
    assert runs[0] == branches * (STEPS - len(skipped))
    pipe = make(case)
    fitted = fit(pipe, {"strategy": "taylorseer-lite", "skipped_steps": skipped, "order": order})
    assert torch.allclose(draw(pipe, case), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert kept(fitted).skipped_steps == skipped


# what is kept


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("family", "strategy"), EVERY)
def test_what_is_kept_is_predicted_to_the_byte(family: str, strategy: str) -> None:
    """The same call on a simulated card, without values, and on the CPU."""
    case = BY_NAME[family]
    pipe = make(case)
    more = {} if STRATEGIES[strategy].lossless else {"skipped_steps": (3, 4, 6)}
    name, cache = denoiser(pipe), settings(strategy, **more)
    request = request_of_example(pipe, case.call(PIXELS) | {"num_inference_steps": STEPS})
    given = Given(case.call(PIXELS) | {"num_inference_steps": STEPS}, torch.device("cpu"))
    with unlimited_card(ANY_CARD) as card:
        simulation = SimulationRun(meta_copy(pipe), card, {"components": {name: {"cache": cache}}}, request)
        simulation.run(given)
        predicted = kept(simulation.fitted)
    fitted = fit(pipe, cache)
    draw(pipe, case)
    assert kept(fitted) == predicted
    assert predicted.device_bytes > 0


def test_what_first_block_keeps_of_a_transformer() -> None:
    """For both predictions: two streams that blocks changed, what the first added to the main one, and nothing else."""
    case = BY_NAME["Flux"]
    pipe = make(case)
    seen: list[int] = []
    pipe.transformer.transformer_blocks[1].register_forward_hook(
        lambda _, __, output: seen.append(sum(tensor.nbytes for tensor in output))
    )
    mains: list[int] = []
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda _, __, output: mains.append(output[1].nbytes))
    fitted = fit(pipe, settings("first-block"))
    draw(pipe, case)
    assert kept(fitted).device_bytes == 2 * (seen[0] + mains[0])


@pytest.mark.parametrize(("strategy", "tensors"), [("taylorseer-lite", 3), ("meancache", 2)])
def test_what_is_kept_of_a_whole_network(strategy: str, tensors: int) -> None:
    """For both predictions: outputs (and timesteps) alone, also in skipped steps."""
    case = BY_NAME["Flux"]
    pipe = make(case)
    outputs: list[int] = []
    pipe.transformer.proj_out.register_forward_hook(lambda _, __, output: outputs.append(output.nbytes))
    fitted = fit(pipe, settings(strategy, skipped_steps=(4, 6)))
    draw(pipe, case)
    timesteps = 2 * 2 * 4 if strategy == "meancache" else 0
    assert kept(fitted).skipped_steps == (4, 6)
    assert kept(fitted).device_bytes == 2 * tensors * outputs[0] + timesteps


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "strategy",
    [
        "static",
        "first-block",
        "taylorseer",
        "taylorseer-lite",
        "blockdance",
        "pab",
        "faster-cache",
        "sea-cache",
        "meancache",
    ],
)
def test_what_is_kept_may_wait_in_host_memory(strategy: str) -> None:
    case = BY_NAME["Flux"]
    pipe = make(case)
    cache = settings(strategy, skipped_steps=(3, 5, 6))
    wanted = draw_within(pipe, case, cache, device="loopback")
    fitted = fit(pipe, cache | {"keep_on": "host"}, device="loopback")
    assert torch.equal(draw(pipe, case), wanted)
    found = kept(fitted)
    assert found.host_bytes > 0
    assert found.device_bytes < found.host_bytes
    fitted.undo()


def draw_within(pipe: Any, case: TinyCase, cache: dict[str, Any], **fields: Any) -> torch.Tensor:
    fitted = fit(pipe, cache, **fields)
    found = draw(pipe, case)
    fitted.undo()
    return found


# with everything else


@pytest.mark.one_in(9)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "strategy", ["static", "first-block", "taylorseer", "pab", "faster-cache", "text-kv", "easycache"]
)
def test_weights_that_stream(family: str, strategy: str) -> None:
    """The same picture, in a known order, with fewer bytes over the link than without a cache."""
    case = BY_NAME[family]
    pipe = make(case)
    more = {} if STRATEGIES[strategy].lossless else {"skipped_steps": (3, 5, 6)}
    cache = settings(strategy, **more)
    wanted = draw_within(pipe, case, cache)
    streamed = {"placement": "stream", "weight_memory": "100KB", "device": "loopback"}
    plain = fit(pipe, None, **streamed)
    draw(pipe, case)
    copied = denoise(plain).bytes_in
    plain.undo()
    fitted = fit(pipe, cache, **streamed)
    assert torch.equal(draw(pipe, case), wanted)
    assert torch.equal(draw(pipe, case), wanted)
    assert not fitted.report().trace.notes
    if strategy != "text-kv" or family in ("StableDiffusion", "Wan", "LTX"):  # which have cross-attention
        assert denoise(fitted).bytes_in < copied
    fitted.undo()


def denoise(fitted: Any) -> PhaseTrace:
    return next(phase for phase in fitted.report().trace.phases if phase.name == "denoise")


@pytest.mark.one_in(9)
@pytest.mark.parametrize("family", ["Flux", "Wan", "StableDiffusion"])
@pytest.mark.parametrize(
    "fields", [{"storage": "float8_e4m3fn"}, {"cfg": "batched"}, {"cfg": "sequential"}, {"attention": "chunked"},
               {"ffn_chunk": "64KB"}, {"placement": "offload"}],
    ids=lambda fields: next(iter(fields)) + "-" + str(next(iter(fields.values()))),
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["static", "pab", "faster-cache", "text-kv", "easycache"])
def test_other_fields_of_the_plan(family: str, strategy: str, fields: dict[str, Any]) -> None:
    """With a cache that skips nothing the picture is that of the other field alone; with skipped steps it is near."""
    case = BY_NAME[family]
    pipe = make(case)
    device = {"device": "loopback"} if "placement" in fields else {}
    wanted = draw_within(pipe, case, None, **fields | device)  # type: ignore[arg-type]
    never = settings(strategy) if STRATEGIES[strategy].lossless else settings(strategy, skipped_steps=())
    assert torch.allclose(draw_within(pipe, case, never, **fields | device), wanted, rtol=0, atol=1e-6)
    if not STRATEGIES[strategy].lossless:
        found = draw_within(pipe, case, settings(strategy, skipped_steps=(3, 5)), **fields | device)
        assert 0 < (found - wanted).abs().max() < 0.5 * wanted.abs().max()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("family", ["Flux", "CogVideoX", "StableDiffusion"])
@pytest.mark.parametrize(
    "strategy", ["first-block", "taylorseer", "pab", "faster-cache", "text-kv", "easycache", "meancache"]
)
def test_calls_of_other_sizes_and_numbers_of_steps(family: str, strategy: str) -> None:
    """Each call is the one that a pipeline would make that was fitted for it alone."""
    case = BY_NAME[family]
    pipe, alone = make(case), make(case)
    more = {} if STRATEGIES[strategy].lossless else {"skipped_steps": (2, 4)}
    cache = settings(strategy, **more)
    fit(pipe, cache)
    larger = {name: value for name, value in case.call(2 * PIXELS).items() if name in ("height", "width")}
    for changes in ({}, larger, {"num_inference_steps": 5}, {"num_inference_steps": 3}, {}):
        fitted = fit(alone, cache)
        wanted = draw(alone, case, **changes)
        fitted.undo()
        assert torch.equal(draw(pipe, case, **changes), wanted)


def test_steps_of_other_blocks() -> None:
    """Where a step uses fewer blocks by itself: it is right, no later one is skipped, and the report says why."""
    case = BY_NAME["Flux"]
    pipe = make(case)
    blocks, calls = pipe.transformer.transformer_blocks, [0]
    forward = type(pipe.transformer).forward

    def changing(network: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        left = calls[0] in leaves
        network.transformer_blocks = blocks[:1] if left else blocks
        try:
            return forward(network, *args, **kwargs)
        finally:
            network.transformer_blocks = blocks

    pipe.transformer.__class__ = type("Changing", (type(pipe.transformer),), {"forward": changing})
    leaves = {5, 6}  # both predictions of step 2
    wanted = draw(pipe, case)
    fitted = fit(pipe, settings("static", skipped_steps=(4,)))
    calls[0] = 0
    assert torch.equal(draw(pipe, case), wanted)
    assert "do not run in the same order" in "".join(fitted.report().trace.notes)
    fitted.undo()
    fitted = fit(pipe, settings("static", skipped_steps=(2,)))
    calls[0] = 0
    with pytest.raises(RunError, match="uses other blocks than the first step"):
        draw(pipe, case)


def test_a_call_that_is_interrupted_leaves_nothing() -> None:
    case = BY_NAME["Flux"]
    pipe = make(case)
    fit(pipe, settings("static", skipped_steps=(2, 3)))
    wanted = draw(pipe, case)

    def stop(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if step == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        draw(pipe, case, callback_on_step_end=stop)
    assert torch.equal(draw(pipe, case), wanted)


def test_text_is_computed_once() -> None:
    """Layers that see only the prompt run in the first step; with another prompt, they run again."""
    case = BY_NAME["Wan"]
    pipe = make(case)
    runs = [0]
    layer = pipe.transformer.blocks[0].attn2.to_k
    fit(pipe, {"strategy": "text-kv"})
    layer.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    one = draw(pipe, case)
    branches = runs[0]
    assert branches in (1, 2)
    other = draw(pipe, case, prompt="another prompt")
    assert runs[0] == 2 * branches
    assert not torch.equal(one, other)


def test_blocks_that_are_compiled() -> None:
    case = BY_NAME["Flux"]
    pipe = make(case)
    cache = settings("static", skipped_steps=(3, 5))
    wanted = draw_within(pipe, case, cache)
    for block in pipe.transformer.transformer_blocks:
        block.compile(backend="eager")
    assert torch.allclose(draw_within(pipe, case, cache), wanted, rtol=0, atol=1e-6)


# the planner


def test_a_budget_with_a_cache_is_kept() -> None:
    case = BY_NAME["Flux"]
    pipe = make(case)
    with unlimited_card(ANY_CARD):
        fitted = tightfit.fit(pipe, budget="300MB", cache="first-block,threshold=0.3", device="simulated:0")
        draw(pipe, case)
        assert fitted.plan.components["transformer"].cache == StepCache(strategy="first-block", threshold=0.3)
        assert kept(fitted).skipped_steps
        skipped = kept(fitted).skipped_steps
        said = f"{len(skipped)} of {STEPS} steps skipped ({', '.join(map(str, skipped))})"
        assert said in str(fitted.report())
        assert fitted.report().trace.lossy == ("step-cache: first-block in transformer",)


# refused


@pytest.mark.parametrize(
    ("family", "cache", "says"),
    [
        ("Flux", {"strategy": "first-blok"}, "did you mean 'first-block'"),
        ("Flux", {"strategy": "static", "threshold": 0.1}, "threshold=0.1 means nothing for strategy=static"),
        ("Flux", {"strategy": "magcache"}, "needs magnitudes"),
        ("Flux", {"strategy": "static", "skipped_steps": (0,)}, "step 0 has nothing to reuse"),
        ("Flux", {"strategy": "dual-block", "first_blocks": 99}, "leaves none of the"),
        ("Flux", {"strategy": "text-kv", "keep_on": "host"}, "keep_on=host means nothing"),
        ("StableDiffusion", {"strategy": "teacache"}, "teacache is for transformers"),
        ("StableDiffusion", {"strategy": "sea-cache"}, "compares tokens of transformers.* set filters=latents"),
        ("Flux", {"strategy": "sea-cache", "first_blocks": 0}, "leaves none of the"),
        ("Flux", {"strategy": "faster-cache", "cross_interval": 2}, "cross_interval=2 means nothing"),
        ("StableDiffusion", {"strategy": "blockdance"}, "blockdance is for transformers"),
        ("StableDiffusion", {"strategy": "static", "first_blocks": 2}, "leaves no block of unet to be skipped"),
    ],
)
def test_what_makes_no_sense_is_refused(family: str, cache: dict[str, Any], says: str) -> None:
    pipe = make(BY_NAME[family])
    with pytest.raises(PlanError, match=says):
        fit(pipe, cache)
    assert type(pipe).__call__ is getattr(diffusers, type(pipe).__name__).__call__


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"level": 1, "cache": "static"}, "cache=static goes with a budget"),
        ({"budget": "8GB", "quality": 30}, "allow=step-cache lets it"),
        ({"budget": "8GB", "allow": ["step-cache"], "quality": -1}, "0 or more"),
        ({"budget": "8GB", "allow": ["step-cache"], "parallel": {"context": 2}}, "leave allow=step-cache out"),
        ({"max_memory": {"cpu": "8GB"}, "allow": ["step-cache"]}, "not with a map"),
        ({"budget": "8GB", "cache": "static", "parallel": {"context": 2}}, "ranks"),
        ({"budget": "8GB", "cache": "static,interval"}, "not STRATEGY,FIELD=VALUE"),
        ({"budget": "8GB", "cache": "static,interval=["}, "a value is not YAML"),
        ({"max_memory": {"cpu": "8GB"}, "cache": "static"}, "leave out cache='static'"),
        ({"plan": {"components": {"vae": {"cache": {"strategy": "static"}}}}}, "vae is no denoiser"),
        ({"plan": {"components": {"transformer": {"cache": {"strategy": "static"}, "exported": "x"}}}}, "exported"),
    ],
)
def test_where_it_cannot_be_is_refused(arguments: dict[str, Any], says: str) -> None:
    pipe = make(BY_NAME["Flux"])
    with pytest.raises(PlanError, match=says):
        tightfit.fit(pipe, **arguments)


def test_the_text_of_a_plan_names_it() -> None:
    plan = Plan.from_mapping({"components": {"transformer": {"cache": {"strategy": "teacache", "threshold": 0.3}}}})
    assert "step cache teacache (threshold=0.3)" in str(plan)
    assert plan.lossy == ("step-cache: teacache in transformer",)
    assert Plan.from_text(plan.to_yaml()) == plan
