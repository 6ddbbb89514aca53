"""Pipelines on which diffusers' or accelerate's own offloading is on: replaced by a plan, and put back by undo()."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from transformers import T5Config, T5EncoderModel

import tightfit
from offloaded_by_others import HERE, by_blocks, by_group, by_layer, by_model
from tightfit.apply.replaced_offloading import offloading_device
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.measure.modules import find_components
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")
Offload = Callable[[Any], None]


def by_map(pipe: Any) -> None:
    pipe.hf_device_map = {"unet": "cpu"}


def by_name(pipe: Any) -> None:
    """As `from_pretrained(folder, device_map="cpu")` leaves it."""
    pipe.hf_device_map = "cpu"


def by_mapped_layers(pipe: Any) -> None:
    devices = {name: "cpu" for name, _ in pipe.unet.named_children()}
    accelerate.dispatch_model(pipe.unet, devices, main_device="cpu", force_hooks=True)


def by_layers_on_disk(pipe: Any) -> None:
    accelerate.disk_offload(pipe.unet, tempfile.mkdtemp(), HERE)


def by_groups_on_disk(pipe: Any) -> None:
    folder = tempfile.mkdtemp()
    apply_group_offloading(pipe.unet, HERE, HERE, offload_type="leaf_level", offload_to_disk_path=folder)


WAYS = [by_model, by_layer, by_group, by_blocks, by_map, by_name, by_mapped_layers]
REMOVE = r"unet is offloaded by accelerate's hooks: call pipe\.remove_all_hooks\(\) first"


def by_groups_of_two_kinds(pipe: Any) -> None:
    apply_group_offloading(pipe.unet.mid_block, HERE, HERE, offload_type="leaf_level", non_blocking=True)
    apply_group_offloading(pipe.unet.conv_in, HERE, HERE, offload_type="leaf_level")


REFUSED = [
    (by_groups_of_two_kinds, r"unet is offloaded by groups.*load the pipeline anew"),
    (by_layers_on_disk, REMOVE),
    (by_groups_on_disk, r"unet is offloaded by groups.*load the pipeline anew"),
]


def seen(pipe: Any) -> list[tuple[Any, ...]]:
    """Classes, hooks and weights."""
    modules = [module for part in find_components(pipe).values() for module in part.modules()]
    hooks = [(getattr(m, "_hf_hook", None), getattr(m, "_diffusers_hook", None)) for m in modules]
    return [(type(m), *hook, *map(id, m.parameters())) for m, hook in zip(modules, hooks, strict=True)]


def hooked(pipe: Any) -> list[Any]:
    """The kinds and settings of all hooks, and where the weights are."""
    found: list[Any] = [[type(hook) for hook in getattr(pipe, "_all_hooks", [])], pipe.hf_device_map]
    for name, part in pipe.unet.named_modules():
        groups = getattr(getattr(part, "_diffusers_hook", None), "hooks", {})
        devices = [(key, tensor.device) for key, tensor in part._parameters.items() if tensor is not None]
        configs = [vars(hook.config) for hook in groups.values() if hasattr(hook, "config")]
        found.append(
            (
                "to" in vars(part),
                name,
                repr(getattr(part, "_hf_hook", None)).split(" object")[0],
                list(groups),
                configs,
                devices,
            )
        )
    return found


@pytest.mark.parametrize("asked", [{"level": 2}, {"budget": "1GB"}], ids=["level", "budget"])
@pytest.mark.parametrize(("offload", "said"), REFUSED, ids=lambda way: getattr(way, "__name__", ""))
def test_it_is_refused_with_what_would_help(offload: Offload, said: str, asked: Any) -> None:
    pipe = CASE.make()
    offload(pipe)
    before = seen(pipe)
    with pytest.raises(PlanError, match=said):
        tightfit.fit(pipe, device="loopback", **asked)
    assert seen(pipe) == before


@pytest.mark.one_in(9)
@pytest.mark.parametrize("asked", [{"level": 3}, {"level": 0}, {"budget": "1GB"}], ids=["level 3", "level 0", "budget"])
@pytest.mark.parametrize("offload", WAYS)
def test_a_plan_replaces_it_and_undo_puts_it_back(offload: Offload, asked: Any) -> None:
    pipe, plain = CASE.make(), CASE.make()
    offload(pipe)
    before = hooked(pipe)
    by_itself = run(plain, CASE)
    tightfit.fit(plain, device="loopback", **asked)
    wanted = run(plain, CASE)
    for _ in range(2):
        fitted = tightfit.fit(pipe, device="loopback", **asked)
        assert not any({"_hf_hook", "_diffusers_hook", "forward"} & set(vars(part)) for part in pipe.unet.modules())
        assert torch.equal(run(pipe, CASE), wanted)
        assert offload in (by_map, by_name) or "unet: undo() puts back the offloading" in str(fitted.report())
    fitted.undo()
    assert hooked(pipe) == before
    assert torch.equal(run(pipe, CASE), by_itself)


@pytest.mark.parametrize("offload", WAYS)
def test_weights_that_change_under_the_plan_are_those_that_are_offloaded_after_it(offload: Offload) -> None:
    pipe, plain = CASE.make(), CASE.make()
    other = {name: tensor * 0.9 for name, tensor in plain.unet.state_dict().items()}
    plain.unet.load_state_dict(other)
    offload(pipe)
    fitted = tightfit.fit(pipe, level=3, device="loopback")
    pipe.unet.load_state_dict(other)
    fitted.undo()
    assert torch.equal(run(pipe, CASE), run(plain, CASE))


@pytest.mark.parametrize("offload", WAYS)
def test_a_fit_that_fails_puts_it_back(offload: Offload) -> None:
    pipe = CASE.make()
    offload(pipe)
    before = hooked(pipe)
    with pytest.raises(BudgetTooSmall):
        tightfit.fit(pipe, budget="100kB", request={"height": 64, "width": 64}, device="loopback")
    with pytest.raises(PlanError):
        tightfit.fit(pipe, plan={"components": {"nothing": {"placement": "stream"}}}, device="loopback")
    assert hooked(pipe) == before


@pytest.mark.parametrize("offload", WAYS)
def test_it_is_refused_while_a_plan_is_followed(offload: Offload) -> None:
    pipe = CASE.make()
    tightfit.fit(pipe, level=2, device="loopback")
    offload(pipe)
    with pytest.raises(PlanError, match=r"unet is offloaded by|has a device map: call pipe.reset_device_map\(\) first"):
        run(pipe, CASE)


@pytest.mark.parametrize("offload", WAYS)
def test_a_copy_is_an_ordinary_pipeline(offload: Offload) -> None:
    pipe = CASE.make()
    offload(pipe)
    tightfit.fit(pipe, level=2, device="loopback")
    twin = copy.deepcopy(pipe)
    assert not any(hasattr(part, "_hf_hook") for part in twin.unet.modules())
    assert torch.equal(run(twin, CASE), run(CASE.make(), CASE))


@pytest.mark.parametrize("offload", WAYS)
def test_a_pipeline_is_freed_with_its_components(offload: Offload) -> None:
    pipe = CASE.make()
    offload(pipe)
    fitted = tightfit.fit(pipe, level=2, device="loopback")
    unet = weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert unet() is None
    fitted.undo()


def test_a_single_module_too() -> None:
    pipe, plain = CASE.make(), CASE.make()
    accelerate.cpu_offload(pipe.unet, HERE)
    fitted = tightfit.fit(pipe.unet, level=2, device="loopback")
    assert torch.equal(run(pipe, CASE), run(plain, CASE))
    fitted.undo()
    assert isinstance(pipe.unet._hf_hook, AlignDevicesHook)


def test_tied_weights_are_tied_again() -> None:
    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    tied = encoder.shared.weight is encoder.encoder.embed_tokens.weight
    accelerate.cpu_offload(encoder, HERE)
    tightfit.fit(encoder, level=0, device="loopback")
    assert tied
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1)], ids=str)
def test_the_card_of_the_offloading_is_known(device: Any) -> None:
    pipe = CASE.make()
    assert offloading_device(pipe) is None
    accelerate.hooks.add_hook_to_module(pipe.unet, CpuOffload(device))
    assert offloading_device(pipe) == torch.device("cuda:1")


def test_hooks_that_move_nothing_are_left_alone() -> None:
    pipe = CASE.make()
    hook = accelerate.hooks.ModelHook()
    accelerate.hooks.add_hook_to_module(pipe.unet, hook)
    apply_layerwise_casting(pipe.vae, torch.float32, torch.float32)
    tightfit.fit(pipe, level=0, device="loopback").undo()
    assert pipe.unet._hf_hook is hook
