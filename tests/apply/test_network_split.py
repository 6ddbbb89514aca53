"""A network split over two cards: the numbers of one card, its weights where the plan puts them, and undone after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

import tightfit
from a_few import a_few
from gradient_checks import assert_close, denoiser_call, gradients
from more_pipelines import MORE_CASES
from simulator.conftest import ACCELERATOR
from tightfit import PlanError
from tightfit.apply.device_maps import hf_device_map
from tightfit.measure.modules import find_blocks, find_components, has_skips, inspect_component
from tightfit.plan.layer_selection import small_tensor_bytes
from tightfit.plan.network_parts import block_order, part_of
from tightfit.schema.plan import ComponentPlan
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

ONE, OTHER, THIRD = "simulated:0", "simulated:1", "simulated:2"


@pytest.fixture(autouse=True)
def cards() -> Any:
    host = Host()
    made = [SimulatedCard(i, ACCELERATOR.model_copy(update={"bytes": 2**40}), host, values="real") for i in range(3)]
    use_cards(made)
    yield made
    use_cards([])


def denoiser_of(pipe: Any) -> str:
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def order_of(network: nn.Module) -> list[str]:
    return block_order(find_blocks(network), has_skips=has_skips(network))


def imprint(pipe: Any) -> dict[str, Any]:
    found = {}
    for name, module in find_components(pipe).items():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
        weights = {path: weight.detach().clone() for path, weight in module.named_parameters()}
        found[name] = (type(module), hooks, weights, {path: id(weight) for path, weight in module.named_parameters()})
    return found


def assert_undone(pipe: Any, before: dict[str, Any]) -> None:
    for name, (kind, hooks, weights, ids) in imprint(pipe).items():
        assert (kind, hooks, ids) == (before[name][0], before[name][1], before[name][3])
        assert all(torch.equal(weights[path], weight) for path, weight in before[name][2].items())
        assert {weight.device.type for weight in weights.values()} <= {"cpu"}


FIELDS = {
    "resident": {"placement": "resident"},
    "offload": {"placement": "offload"},
    "stream": {"placement": "stream"},
    "blocks": {"placement": "stream", "granularity": "block"},
    "disk": {"placement": "stream", "offload_to": "disk"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("case", a_few(CASES, "StableDiffusion", "Flux"))
def test_numbers_are_those_of_one_card(case: TinyCase, fields: dict[str, Any], cards: Any) -> None:
    together = tightfit.fit(pipe := case.make(), level=0, device=ONE)
    wanted = run(pipe, case).cpu()
    together.undo()
    before, name = imprint(pipe), denoiser_of(pipe)
    order = order_of(getattr(pipe, name))
    first = order[len(order) // 2]
    fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {name: {**fields, "split": {OTHER: first}}}})
    assert fitted.plan.devices == (ONE, OTHER)
    assert torch.equal(run(pipe, case).cpu(), wanted)
    assert torch.equal(run(pipe, case).cpu(), wanted)  # the second time by the order that was seen
    trace = fitted.report().trace
    (denoise,) = [phase for phase in trace.phases if phase.name == "denoise"]
    assert denoise.other_devices[OTHER] > 0
    assert not [note for note in trace.notes if "memory" in note]
    fitted.undo()
    assert_undone(pipe, before)


def case_of(name: str) -> TinyCase:
    return next(case for case in (*CASES, *MORE_CASES) if case.name == name)


def alone(pipe: Any, case: TinyCase) -> torch.Tensor:
    together = tightfit.fit(pipe, level=0, device=ONE)
    wanted = run(pipe, case).cpu()
    together.undo()
    return wanted


def split_at(pipe: Any, name: str, *places: int, devices: tuple[str, ...] = (OTHER, THIRD)) -> dict[str, Any]:
    order = order_of(getattr(pipe, name))
    return {"split": {device: order[place] for device, place in zip(devices, places, strict=False)}}


def args_device(out: Any) -> int:
    return (out[-1] if isinstance(out, tuple) else out).device.index  # type: ignore[no-any-return]


def test_each_block_computes_where_its_part_is() -> None:
    case = case_of("Flux")
    pipe = case.make()
    network, ran = pipe.transformer, {}
    for path, block in find_blocks(network).items():
        block.register_forward_hook(lambda _, args, out, path=path: ran.update({path: args_device(out)}))
    plan = {"device": ONE, "components": {"transformer": split_at(pipe, "transformer", 1, 3)}}
    tightfit.fit(pipe, plan=plan)
    run(pipe, case)
    order = order_of(network)
    assert ran == {path: 0 if place < 1 else 1 if place < 3 else 2 for place, path in enumerate(order)}
    where = {path: weight.device.index for path, weight in network.named_parameters()}
    for path, device in where.items():
        block = next((block for block in order if path.startswith(f"{block}.")), None)
        assert device == (ran[block] if block else 0), path


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("name", ["StableDiffusion", "Flux", "Wan"])
def test_a_text_encoder_may_be_split_over_the_other_cards(name: str, placement: str) -> None:
    case = case_of(name)
    pipe = case.make()
    wanted = alone(pipe, case)
    encoder = "text_encoder_2" if name == "Flux" else "text_encoder"
    fields = split_at(pipe, encoder, 1, devices=(THIRD,)) | {"device": OTHER, "placement": placement}
    fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {encoder: fields}})
    assert torch.equal(run(pipe, case).cpu(), wanted)
    encode = next(phase for phase in fitted.report().trace.phases if phase.name == "encode")
    assert encode.other_devices[OTHER] > 0
    assert encode.other_devices[THIRD] > 0


def test_residuals_of_a_controlnet_are_added_on_either_card() -> None:
    case = case_of("StableDiffusionControlNet")
    pipe = case.make()
    wanted = alone(pipe, case)
    for place in (1, 2, 3):
        parts = {"unet": split_at(pipe, "unet", place), "controlnet": split_at(pipe, "controlnet", 1)}
        fitted = tightfit.fit(pipe, plan={"device": ONE, "components": parts})
        assert torch.equal(run(pipe, case).cpu(), wanted), place
        fitted.undo()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "level", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux"])
def test_levels_and_other_sizes(name: str, level: int) -> None:
    case = case_of(name)
    pipe = case.make()
    denoiser = denoiser_of(pipe)
    choices: dict[str, Any] = {"device": ONE, "level": level}
    together = tightfit.fit(pipe, plan=choices)
    wanted = [run(pipe, case, height).cpu() for height in (64, 96, 64)]
    together.undo()
    tightfit.fit(pipe, plan=choices | {"components": {denoiser: split_at(pipe, denoiser, 2)}})
    found = [run(pipe, case, height).cpu() for height in (64, 96, 64)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "int8"])
def test_eight_bits(storage: str, placement: str) -> None:
    if storage == "int8":
        pytest.importorskip("torchao")
    case = case_of("Flux")
    pipe = case.make()
    fields = {"storage": storage, "placement": placement}
    together = tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": fields}})
    wanted = run(pipe, case).cpu()
    together.undo()
    before = imprint(pipe)
    split = split_at(pipe, "transformer", 2) | fields
    fitted = tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": split}})
    assert torch.equal(run(pipe, case).cpu(), wanted)
    fitted.undo()
    assert_undone(pipe, before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
def test_an_adapter_is_loaded_fused_and_unloaded(placement: str) -> None:
    case = case_of("Flux")

    def drawn(fields: dict[str, Any]) -> list[torch.Tensor]:
        pipe = case.make()
        if "split" in fields:
            fields = fields | split_at(pipe, "transformer", 2)
        tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": fields}})
        found = [run(pipe, case).cpu()]
        torch.manual_seed(0)
        pipe.transformer.add_adapter(
            LoraConfig(r=2, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False), "made"
        )
        found.append(run(pipe, case).cpu())
        pipe.transformer.fuse_lora(adapter_names=["made"])
        found.append(run(pipe, case).cpu())
        pipe.transformer.unfuse_lora()
        found.append(run(pipe, case).cpu())
        pipe.unload_lora_weights()
        found.append(run(pipe, case).cpu())
        return found

    wanted = drawn({"placement": placement})
    assert not torch.equal(wanted[0], wanted[1])
    found = drawn({"placement": placement, "split": True})
    assert [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)] == [True] * 5


def test_what_each_block_of_a_part_takes_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    to = torch.Tensor.to

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = to(self, *args, **kwargs)
        if {self.device.type, found.device.type} == {"privateuseone"} and found.device != self.device:
            copied.append(tuple(self.shape))
        return found

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Adds() for _ in range(5))

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            table = time * 2
            for block in self.blocks:
                x = block(x, time, table=table)
            return x

    network = Steps()
    x, time = torch.ones(2, 3), torch.ones(3)
    wanted = network(x, time)
    plan = {"device": ONE, "components": {"model": {"split": {OTHER: "blocks.2"}}}}
    tightfit.fit(network, plan=plan)
    monkeypatch.setattr(torch.Tensor, "to", counted)
    with torch.no_grad():
        found = network(x, time)
    assert torch.equal(to(found, "cpu"), wanted)
    assert copied == [(2, 3), (3,), (3,), (2, 3)]  # there, with what all blocks take; and back


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor, time: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * self.weight + time + table


def test_what_was_written_to_crosses_again() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Adds() for _ in range(3))

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            time = time.clone()
            kept = torch.zeros(2, 3, device=x.device)
            for block in self.blocks:
                time += 1
                x = block(x, time, table=time)
                kept += x  # written to where it is
                x = x + kept * time
            kept[0] = x[1]
            return torch.stack([x, kept])

    for mode in (torch.no_grad, torch.inference_mode):
        network = Writes()
        x, time = torch.ones(2, 3), torch.ones(3)
        with mode():
            wanted = network(x, time)
            for place in (1, 2):
                plan = {"device": ONE, "components": {"model": {"split": {OTHER: f"blocks.{place}"}}}}
                fitted = tightfit.fit(network, plan=plan)
                assert torch.equal(network(x, time).cpu(), wanted)
                fitted.undo()


def test_an_error_in_a_block_leaves_nothing_behind() -> None:
    case = case_of("Flux")
    pipe = case.make()
    wanted = alone(pipe, case)
    tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": split_at(pipe, "transformer", 1)}})
    block, failing = pipe.transformer.single_transformer_blocks[0], [True]

    def fail(*_: Any) -> None:
        if failing:
            raise RuntimeError("it broke")

    handle = block.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="it broke"):
        run(pipe, case)
    assert not torch.overrides._get_current_function_mode_stack()
    failing.clear()
    assert torch.equal(run(pipe, case).cpu(), wanted)
    handle.remove()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"split": {OTHER: "transformer_block.1"}}, "unknown block of transformer 'transformer_block.1': did you mean"),
        ({"split": {OTHER: "proj_out"}}, "unknown block of transformer 'proj_out'"),
        ({"split": {OTHER: "transformer_blocks.0"}}, "leaves no block before the part on simulated:1"),
        (
            {"split": {OTHER: "single_transformer_blocks.0", THIRD: "transformer_blocks.1"}},
            "runs transformer_blocks.1 before single_transformer_blocks.0",
        ),
        ({"split": {ONE: "transformer_blocks.1"}}, "simulated:0 is where transformer begins already"),
        ({"split": {"moon:1": "transformer_blocks.1"}}, "unknown device 'moon'"),
        ({"split": {"cpu": "transformer_blocks.1"}}, "several devices have to be cards"),
        ({"split": {OTHER: {"first": "proj_out", "placement": "offload", "ring_buffer": 1}}}, "ring_buffer"),
        ({"split": {OTHER: "transformer_blocks.1"}, "exported": "a.pt"}, "leave split out"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(fields: dict[str, Any], said: str) -> None:
    pipe = case_of("Flux").make()
    before = imprint(pipe)
    with pytest.raises(tightfit.InputError, match=said):
        tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": fields}})
    assert_undone(pipe, before)


def test_autoencoders_and_ranks_are_refused() -> None:
    pipe = case_of("Flux").make()
    split = {"split": {OTHER: "decoder.up_blocks.0"}}
    with pytest.raises(PlanError, match="vae is an autoencoder, which is not split"):
        tightfit.fit(pipe, plan={"device": ONE, "components": {"vae": split}})
    split = {"split": {OTHER: "transformer_blocks.1"}}
    with pytest.raises(PlanError, match="context=2 ranks have one each"):
        tightfit.fit(pipe, plan={"device": ONE, "context": 2, "components": {"transformer": split}})


def test_a_weight_in_two_parts_is_refused() -> None:
    pipe = case_of("Flux").make()
    first, *_, last = pipe.transformer.transformer_blocks
    last.attn.to_q.weight = first.attn.to_q.weight
    with pytest.raises(PlanError, match="are one weight, and split puts them on two devices"):
        tightfit.fit(pipe, plan={"device": ONE, "components": {"transformer": split_at(pipe, "transformer", 1)}})


def test_a_device_map_names_the_blocks_of_later_parts() -> None:
    pipe = case_of("Flux").make()
    order = order_of(pipe.transformer)
    later = {"first": order[2], "placement": "offload"}
    plan = tightfit.Plan.from_mapping({"device": ONE, "components": {"transformer": {"split": {OTHER: order[1]}}}})
    found = hf_device_map(plan, pipe)
    assert found["transformer"] == ONE
    assert {name: place for name, place in found.items() if "." in name} == {
        f"transformer.{path}": OTHER for path in order[1:]
    }
    plan = tightfit.Plan.from_mapping({"device": ONE, "components": {"transformer": {"split": {OTHER: later}}}})
    assert hf_device_map(plan, pipe)[f"transformer.{order[2]}"] == "cpu"


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_parts_have_placements_of_their_own(store: str) -> None:
    case = case_of("Flux")
    pipe = case.make()
    wanted = alone(pipe, case)
    order = order_of(pipe.transformer)
    later = {"first": order[2], "placement": "stream", "offload_to": store, "weight_memory": "1MB"}
    plan = {"device": ONE, "components": {"transformer": {"placement": "offload", "split": {OTHER: later}}}}
    fitted = tightfit.fit(pipe, plan=plan)
    part = fitted.plan.parts_of("transformer")[OTHER]
    assert (part.placement, part.offload_to) == ("stream", store)
    assert part.resident_layers is not None
    assert torch.equal(run(pipe, case).cpu(), wanted)
    assert tightfit.Plan.from_text(fitted.plan.to_yaml()) == fitted.plan
    fitted.undo()
    fitted = tightfit.fit(pipe, plan=fitted.plan)  # as it is written to a file
    assert torch.equal(run(pipe, case).cpu(), wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("placement", [{"placement": "resident"}, {"placement": "stream"}], ids=["resident", "stream"])
@pytest.mark.parametrize("name", ["StableDiffusion", "Flux"])
def test_gradients_are_those_of_one_card(name: str, placement: dict[str, Any]) -> None:
    network, args, kwargs = denoiser_call(name)
    order = order_of(network)
    one = tightfit.fit(network, level=0, device=ONE)
    wanted = {key: value.cpu() for key, value in gradients(network, args, kwargs).items()}
    one.undo()
    split = {"split": {OTHER: order[len(order) // 2]}}
    fitted = tightfit.fit(network, plan={"device": ONE, "components": {"model": placement | split}})
    try:
        for _ in range(2):
            assert_close(gradients(network, args, kwargs), wanted)
    finally:
        fitted.undo()


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_parts_have_the_bytes_of_the_whole(name: str) -> None:
    network = denoiser_of(pipe := case_of(name).make())
    component = inspect_component(network, getattr(pipe, network))
    for first in order_of(getattr(pipe, network))[1:]:
        chosen = ComponentPlan(split={OTHER: first})
        parts = [part_of(component, chosen, index) for index in (0, 1)]
        assert sum(part.bytes for part in parts) == component.bytes, first
        assert all(small_tensor_bytes(part) >= 0 for part in parts), first
