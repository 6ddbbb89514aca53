"""Pipelines on which diffusers' or accelerate's own offloading is on: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting

import tightfit
from offloaded_by_others import HERE, by_group, by_layer, by_model
from tightfit.errors import PlanError
from tightfit.measure.modules import find_components
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")


def by_map(pipe: Any) -> None:
    pipe.hf_device_map = {"unet": "cpu"}


WAYS = [
    (by_model, r"unet is offloaded by accelerate's hooks: call pipe\.remove_all_hooks\(\) first"),
    (by_layer, r"unet is offloaded by accelerate's hooks: call pipe\.remove_all_hooks\(\) first"),
    (by_group, r"unet is offloaded by groups.*load the pipeline anew"),
    (by_map, r"device map: call pipe\.reset_device_map\(\) first"),
]


def seen(pipe: Any) -> list[tuple[Any, ...]]:
    """Classes, hooked methods and weights."""
    modules = [module for part in find_components(pipe).values() for module in part.modules()]
    return [(type(m), vars(m).get("forward"), *map(id, m.parameters())) for m in modules]


@pytest.mark.parametrize("asked", [{"level": 2}, {"budget": "1GB"}], ids=["level", "budget"])
@pytest.mark.parametrize(("offload", "said"), WAYS, ids=lambda way: getattr(way, "__name__", ""))
def test_it_is_refused_with_what_would_help(offload: Callable[[Any], None], said: str, asked: Any) -> None:
    pipe = CASE.make()
    offload(pipe)
    before = seen(pipe)
    with pytest.raises(PlanError, match=said):
        tightfit.fit(pipe, device="loopback", **asked)
    assert seen(pipe) == before


@pytest.mark.parametrize("offload", [by_model, by_layer, by_map])
def test_what_is_said_helps(offload: Callable[[Any], None]) -> None:
    pipe, plain = CASE.make(), CASE.make()
    tightfit.fit(plain, level=3, device="loopback")
    offload(pipe)
    pipe.reset_device_map() if offload is by_map else pipe.remove_all_hooks()
    tightfit.fit(pipe, level=3, device="loopback")
    assert torch.equal(run(pipe, CASE), run(plain, CASE))


def test_a_single_module_is_refused_too() -> None:
    unet = CASE.make().unet
    accelerate.cpu_offload(unet, HERE)
    with pytest.raises(PlanError, match=r"remove_hook_from_module\(model, recurse=True\)"):
        tightfit.fit(unet, level=3, device="loopback")


def test_hooks_that_move_nothing_are_left_alone() -> None:
    pipe = CASE.make()
    accelerate.hooks.add_hook_to_module(pipe.unet, accelerate.hooks.ModelHook())
    apply_layerwise_casting(pipe.vae, torch.float32, torch.float32)
    tightfit.fit(pipe, level=0, device="loopback").undo()
