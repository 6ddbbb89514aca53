"""Step caches beside those of diffusers and cache-dit: which steps they skip, bytes they keep, time per picture.

    PYTHONPATH=src:tests OMP_NUM_THREADS=1 python -W ignore bench/step_cache_rivals.py [--again] [--turns 3]

On the CPU, with the tests' FLUX, Wan and CogVideoX pipelines, whose transformers are made wider and deeper: random
weights, float32. After each step a script moves the latents, by an amount that differs from step to step, so that at
each threshold some steps are alike and others are not. For each case, one line of CASES:

- steps: a block runs if its first attention computes its queries. Counted for each step; a step is skipped if fewer
  blocks run in it than there are.
- bytes: after each step, the storages of all tensors that the cache's state objects hold, each storage once; the most
  of all steps. `reported` is what tightfit's own report says.
- seconds: a picture without a cache, with theirs and with ours, in turns (A B C A B C …), in one process on one core;
  processor time and time that passed, each turn.
  `fitted`, for each pipeline: the same for tightfit without a cache, to tell what is the cache's and what is not.
- pictures: the largest difference of ours from theirs, over the largest value of theirs.

A case that is in bench/results/step-cache-rivals.json already is left out, unless --again. cache-dit is measured if it
is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from diffusers.hooks import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks.hooks import StateManager
from torch import nn

import tightfit
from measuring import RESULTS, write
from tiny_pipelines import CASES as PIPELINES

NAME = "step-cache-rivals"
STEPS = 20
FRAMES = 5
WIDER: dict[str, dict[str, Any]] = {  # what the transformers have in place of the tests' sizes
    "Flux": {"num_layers": 4, "num_single_layers": 8, "axes_dims_rope": (8, 12, 12)},
    "Wan": {"num_layers": 6, "ffn_dim": 1024},
    "CogVideoX": {"num_layers": 6},
}
HEADS = {"num_attention_heads": 8, "attention_head_dim": 32}
THRESHOLDS = {  # what the first block adds changes by this much here: few, about half, and most steps are skipped
    "Flux": (0.42, 0.5, 0.65),
    "Wan": (0.12, 0.18, 0.25),
    "CogVideoX": (0.15, 0.25, 0.5),
}
ATTENTION = [r"(transformer_)?blocks\.\d+\.attn\d"]  # of Wan and CogVideoX: diffusers' default finds none of theirs
DUAL_BLOCKS = ((1, 0, 6), (2, 2, 2), (2, 1, 4))  # first blocks, last blocks, warm-up, for these thresholds
DRIFT = (0.01, 0.02, 0.3, 0.01, 0.05, 0.02, 0.6, 0.01, 0.1, 0.02)  # standard deviation of what is added after a step
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A rival's cache, and the strategy of ours that means the same, or the nearest one."""

    family: str
    rival: str
    settings: str
    ours: dict[str, Any]
    theirs: Callable[[Any], Callable[[], Any]]  # switches a pipeline's cache on; returns how to get its state
    same: bool  # whether both are the same algorithm
    pixels: int = 64

    @property
    def key(self) -> str:
        return f"{self.family}, {self.rival}, {self.settings}"


# the pipelines


def make_pipeline(family: str) -> Any:
    """The tests' pipeline with a wider and deeper transformer, as an instance of a class of its own.

    cache-dit changes the pipeline's class, which is that of the others, too, if it is not its own.
    """
    pipe: Any = next(case for case in PIPELINES if case.name == family).make()
    kind = type(pipe.transformer)
    torch.manual_seed(0)
    made = kind.from_config(dict(pipe.transformer.config) | HEADS | WIDER[family])
    pipe.register_modules(transformer=made.eval())
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, family: str, after_step: Callable[[int], object] = lambda step: None) -> torch.Tensor:
    """One picture or clip, with drifting latents; `after_step` is called after each step."""
    arguments = next(case for case in PIPELINES if case.name == family).call()
    if family == "Flux":  # as FLUX.1 is used: one prediction a step
        del arguments["true_cfg_scale"], arguments["negative_prompt"]
    else:
        arguments["num_frames"] = FRAMES
    drawn = torch.Generator().manual_seed(7)

    def drift(_: Any, step: int, __: Any, given: dict[str, Any]) -> dict[str, Any]:
        after_step(step)
        latents = given["latents"]
        added = torch.randn(latents.shape, generator=drawn, dtype=latents.dtype)
        return {"latents": latents + DRIFT[step % len(DRIFT)] * added}

    with torch.no_grad():
        picture: torch.Tensor = pipe(**arguments | {"num_inference_steps": STEPS}, callback_on_step_end=drift)[0]
    return picture.float()


def blocks_of(network: nn.Module) -> list[nn.Module]:
    lists = ("transformer_blocks", "single_transformer_blocks", "blocks")
    return [block for name in lists for block in getattr(network, name, ())]


# what is measured


@dataclass
class Watched:
    """Blocks that ran in each step, and bytes after it."""

    ran: list[int] = field(default_factory=lambda: [0])
    kept: list[int] = field(default_factory=list)


def watch(pipe: Any, family: str, state: Callable[[], Any]) -> tuple[torch.Tensor, Watched]:
    """Draw once, counting blocks and bytes."""
    seen = Watched()

    def counted(*_: Any) -> None:
        seen.ran[-1] += 1

    def after_step(_: int) -> None:
        seen.ran.append(0)
        seen.kept.append(sum(storages(tensors_in(state(), set())).values()))

    hooks = []
    for block in blocks_of(pipe.transformer):
        queries = next(layer for name, layer in block.named_modules() if name.endswith("to_q"))
        hooks.append(queries.register_forward_hook(counted))
    picture = draw(pipe, family, after_step)
    for hook in hooks:
        hook.remove()
    assert seen.ran.pop() == 0
    return picture, seen


def storages(tensors: Iterator[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages of `tensors`, by their addresses."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that `value` holds, through containers and objects, but not through networks and functions."""
    if id(value) in seen or isinstance(value, nn.Module | FunctionType | MethodType | ModuleType | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors_in(each, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


# contenders


def first_block(threshold: float) -> Callable[[Any], Callable[[], Any]]:
    return diffusers_cache(lambda: FirstBlockCacheConfig(threshold=threshold))


def taylorseer(**fields: Any) -> Callable[[Any], Callable[[], Any]]:
    """diffusers' TaylorSeer, whose factors are kept in the network's own precision."""
    return diffusers_cache(lambda: TaylorSeerCacheConfig(taylor_factors_dtype=torch.float32, **fields))


def diffusers_cache(config: Callable[[], Any]) -> Callable[[Any], Callable[[], Any]]:
    def switch_on(pipe: Any) -> Callable[[], Any]:
        pipe.transformer.enable_cache(config())
        registries = [part._diffusers_hook for part in pipe.transformer.modules() if hasattr(part, "_diffusers_hook")]
        hooks = [hook for registry in registries for hook in registry.hooks.values()]
        managers = [value for hook in hooks for value in vars(hook).values() if isinstance(value, StateManager)]
        return lambda: [manager._state_cache for manager in managers]

    return switch_on


def dual_block(order: int = 0, **fields: Any) -> Callable[[Any], Callable[[], Any]]:
    """cache-dit's DBCache; with an `order`, its TaylorSeer calibrator predicts what it keeps."""

    def switch_on(pipe: Any) -> Callable[[], Any]:
        import cache_dit

        more = {"calibrator_config": cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order)} if order else {}
        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**fields), **more)
        return lambda: pipe._context_manager._cached_context_manager

    return switch_on


def ours(pipe: Any, settings: dict[str, Any] | None) -> tuple[Any, Callable[[], Any]]:
    plan = {"device": "cpu", "components": {"transformer": {"cache": settings}}}
    fitted = tightfit.fit(pipe, plan=plan, count_activations=False)
    return fitted, lambda: [cache._branches for cache in fitted.session.caches.values()]


# cases


def runs_of_taylorseer(interval: int, warm_up: int) -> tuple[int, ...]:
    """The steps that diffusers' TaylorSeer runs: counted from one after its warm-up, not from its end."""
    return tuple(step for step in range(STEPS) if step < warm_up or (step - warm_up - 1) % interval == 0)


def without(steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(step for step in range(STEPS) if step not in steps)


def cases() -> Iterator[Case]:
    for family in WIDER:
        for threshold in THRESHOLDS[family]:
            yield Case(
                family, "diffusers FirstBlockCache", f"threshold {threshold}",
                {"strategy": "first-block", "threshold": threshold}, first_block(threshold), same=True,
            )  # fmt: skip
        for threshold, (first, last, warm_up) in zip(
            THRESHOLDS[family], ((1, 0, 6), (2, 2, 2), (2, 1, 4)), strict=True
        ):
            said = {"first_blocks": first, "last_blocks": last, "warm_up": warm_up, "threshold": threshold}
            yield Case(
                family, "cache-dit DBCache", f"F{first} B{last}, warm-up {warm_up}, threshold {threshold}",
                {"strategy": "dual-block"} | said,
                dual_block(
                    Fn_compute_blocks=first, Bn_compute_blocks=last, max_warmup_steps=warm_up,
                    residual_diff_threshold=threshold,
                ), same=True,
            )  # fmt: skip
        for interval, order in ((2, 1), (4, 2)):
            runs = (*range(6), *range(5 + interval, STEPS, interval))
            mask = [int(step in runs) for step in range(STEPS)]
            yield Case(
                family, "cache-dit DBCache, TaylorSeer", f"F1 B0, warm-up 6, interval {interval}, order {order}",
                {"strategy": "taylorseer", "warm_up": 6, "interval": interval, "order": order},
                dual_block(
                    order, Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=6,
                    steps_computation_mask=mask, steps_computation_policy="static",
                ), same=True,
            )  # fmt: skip
        for interval, order in ((2, 1), (4, 2)):
            said = {"cache_interval": interval, "max_order": order, "disable_cache_before_step": 4}
            skipped = without(runs_of_taylorseer(interval, 4))
            yield Case(
                family, "diffusers TaylorSeer", f"warm-up 4, interval {interval}, order {order}",
                {"strategy": "taylorseer", "skipped_steps": skipped, "order": order},
                taylorseer(cache_identifiers=None if family == "Flux" else ATTENTION, **said), same=False,
            )  # fmt: skip
            yield Case(
                family, "diffusers TaylorSeer, lite", f"warm-up 4, interval {interval}, order {order}",
                {"strategy": "taylorseer-lite", "skipped_steps": skipped, "order": order},
                taylorseer(use_lite_mode=True, **said), same=True,
            )  # fmt: skip


def in_turns(pipes: dict[str, Any], family: str, turns: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and seconds of processor time of a picture by each of `pipes`, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    cpu: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(turns):
        for name, pipe in pipes.items():
            begun, used = time.perf_counter(), time.process_time()
            draw(pipe, family)
            seconds[name].append(time.perf_counter() - begun)
            cpu[name].append(time.process_time() - used)
    return seconds, cpu


def measure_fitted(family: str, turns: int) -> Row:
    """A picture without a cache, by a pipeline as it is and by one that tightfit has fitted."""
    plain, fitted = make_pipeline(family), make_pipeline(family)
    ours(fitted, None)
    for pipe in (plain, fitted):  # warm
        draw(pipe, family)
    seconds, cpu = in_turns({"plain": plain, "fitted": fitted}, family, turns)
    medians = {name: {"cpu": statistics.median(cpu[name]), "seconds": statistics.median(seconds[name])} for name in cpu}
    return medians | {"turns": {"cpu": cpu, "seconds": seconds}}


def measure(case: Case, turns: int) -> Row:
    plain, theirs, mine = (make_pipeline(case.family) for _ in range(3))
    state = case.theirs(theirs)
    fitted, our_state = ours(mine, case.ours)
    _, without_cache = watch(plain, case.family, lambda: ())
    wanted, their_run = watch(theirs, case.family, state)
    found, our_run = watch(mine, case.family, our_state)
    (trace,) = fitted.report().trace.caches
    seconds, cpu = in_turns({"plain": plain, "theirs": theirs, "ours": mine}, case.family, turns)
    row: Row = {"family": case.family, "rival": case.rival, "settings": case.settings, "same": case.same}
    for name, run in (("theirs", their_run), ("ours", our_run)):
        skipped = [step for step, ran in enumerate(run.ran) if ran < without_cache.ran[step]]
        row[name] = {
            "skipped": skipped, "blocks": run.ran, "kept": max(run.kept),
            "cpu": statistics.median(cpu[name]), "seconds": statistics.median(seconds[name]),
        }  # fmt: skip
    row["ours"] |= {"reported": trace.device_bytes, "reported_skipped": list(trace.skipped_steps)}
    row["plain"] = {"cpu": statistics.median(cpu["plain"]), "seconds": statistics.median(seconds["plain"])}
    row["difference"] = float((found - wanted).abs().max() / wanted.abs().max())
    row["turns"] = {"cpu": cpu, "seconds": seconds}
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--again", action="store_true", help="measure all cases, also those that are there")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--only", default="", help="only cases whose name has this in it")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / f"{NAME}.json"
    known: Row = {} if chosen.again or not file.exists() else json.loads(file.read_text())
    rows, fitted = known.get("rows", {}), known.get("fitted", {})
    for family in WIDER:
        if family not in fitted and chosen.only in family:
            fitted[family] = measure_fitted(family, chosen.turns)
    for case in cases():
        if case.key in rows or chosen.only not in case.key:
            continue
        if case.rival.startswith("cache-dit") and importlib.util.find_spec("cache_dit") is None:
            print(f"{case.key}: cache-dit is not installed")
            continue
        row = measure(case, chosen.turns)
        rows[case.key] = row
        shown = {name: {"skipped": row[name]["skipped"], "kept": row[name]["kept"]} for name in ("theirs", "ours")}
        print(case.key, shown, row["difference"], flush=True)
        rivals = {"cache-dit": version("cache-dit")} if importlib.util.find_spec("cache_dit") else {}
        write(NAME, {"rivals": rivals, "steps": STEPS, "fitted": fitted, "rows": rows})


if __name__ == "__main__":
    main()
