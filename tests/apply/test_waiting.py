"""What one part of a network leaves for a later one is in host memory meanwhile, however the network keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from devices.late import LateCard
from inspection import assert_same, imprint
from tightfit import fit
from tightfit.apply.activations.activation_offload import offload_waiting_activations
from tightfit.devices.device import Device, LoopbackDevice
from tightfit.measure.modules import find_blocks
from tightfit.measure.recorder import Recorder
from tightfit.schema.machine import Accelerator
from tightfit.schema.results import PhaseTrace
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import _unet, heads

Inputs = dict[str, Any]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


STAGES: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
PLAIN: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


def conditional() -> tuple[nn.Module, Inputs]:
    inputs = {"sample": noise(2, 4, 16, 16), "timestep": 3, "encoder_hidden_states": noise(2, 5, 16)}
    return _unet(cross_attention_dim=16), inputs


def with_controlnet() -> tuple[nn.Module, Inputs]:
    unet, inputs = conditional()
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8, 16))
    down, mid = net(**inputs, controlnet_cond=noise(2, 3, 64, 64), return_dict=False)
    added = {"down_block_additional_residuals": [noise(*each.shape) for each in down]}
    return unet, {**inputs, **added, "mid_block_additional_residual": noise(*mid.shape)}


def unconditional() -> tuple[nn.Module, Inputs]:
    return diffusers.UNet2DModel(**STAGES, **PLAIN), {"sample": noise(2, 3, 16, 16), "timestep": 3}


def video() -> tuple[nn.Module, Inputs]:
    unet = diffusers.UNet3DConditionModel(
        **STAGES,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    return unet, {"sample": noise(1, 4, 2, 16, 16), "timestep": 3, "encoder_hidden_states": noise(1, 5, 16)}


def kandinsky() -> tuple[nn.Module, Inputs]:
    unet = diffusers.Kandinsky3UNet(
        in_channels=4,
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),  # what comes next and what goes are there while one block works
        cross_attention_dim=4,
        encoder_hid_dim=32,
    )
    masked = {"encoder_hidden_states": noise(2, 5, 32), "encoder_attention_mask": torch.ones(2, 5)}
    return unet, {"sample": noise(2, 4, 16, 16), "timestep": torch.tensor(3), **masked}


def cascade() -> tuple[nn.Module, Inputs]:
    unet = diffusers.models.unets.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),) * 2,
        clip_text_in_channels=16,
        clip_text_pooled_in_channels=16,
        clip_image_in_channels=16,
        timestep_ratio_embedding_dim=16,
        switch_level=(False,),
    )
    times = {"timestep_ratio": torch.tensor([0.3, 0.3])}
    return unet, {"sample": noise(2, 4, 32, 32), **times, "clip_text_pooled": noise(2, 1, 16)}


def hunyuan() -> tuple[nn.Module, Inputs]:
    """A transformer whose first blocks leave their tokens to its last ones."""
    transformer = diffusers.HunyuanDiT2DModel(
        **heads(),
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=32,
        num_layers=6,
        mlp_ratio=2.0,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        text_len=5,
        text_len_t5=5,
    )
    masks = {"text_embedding_mask": torch.ones(2, 5), "text_embedding_mask_t5": torch.ones(2, 5)}
    prompts = {"encoder_hidden_states": noise(2, 5, 16), "encoder_hidden_states_t5": noise(2, 5, 16)}
    sizes = {"image_meta_size": torch.full((2, 6), 16), "style": torch.zeros(2, dtype=torch.long)}
    places = {"timestep": torch.tensor([3.0, 3.0]), "image_rotary_emb": (noise(64, 16), noise(64, 16))}
    return transformer, {"hidden_states": noise(2, 4, 16, 16), **places, **masks, **prompts, **sizes}


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    function.__name__: function
    for function in (conditional, with_controlnet, unconditional, video, kandinsky, cascade, hunyuan)
}


def made(name: str) -> tuple[nn.Module, Inputs]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network, inputs = NETWORKS[name]()
    return network.eval(), inputs


@contextmanager
def waiting(network: nn.Module, device: Device | None = None) -> Iterator[Recorder]:
    recorder = Recorder(device or LoopbackDevice())
    with ExitStack() as undo:
        offload_waiting_activations(network, recorder.device, recorder, undo)
        yield recorder


def measured(network: nn.Module, inputs: Inputs, recorder: Recorder) -> tuple[torch.Tensor, PhaseTrace]:
    with recorder.call():
        recorder.enter("denoise")
        (output,) = network(**inputs, return_dict=False)
        trace = recorder.trace()
    return output, trace.phases[0]


def at_each_block(network: nn.Module, inputs: Inputs, recorder: Recorder) -> list[int]:
    """Bytes of activations when each block of `network` begins."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        recorder.sample()
        seen.append(recorder.live().activations)

    handles = [block.register_forward_pre_hook(look) for block in find_blocks(network).values()]
    measured(network, inputs, recorder)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_what_waits_is_in_host_memory_meanwhile(name: str) -> None:
    network, inputs = made(name)
    before = imprint(network)
    untouched, there = measured(network, inputs, Recorder(LoopbackDevice()))
    all_there = at_each_block(network, inputs, Recorder(LoopbackDevice()))
    with waiting(network) as recorder:
        passes = [measured(network, inputs, recorder) for _ in range(3)]
        away = at_each_block(network, inputs, recorder)
    assert all(type(output) is torch.Tensor for output, _ in passes)
    assert all(torch.equal(output, untouched) for output, _ in passes)
    assert all(phase.bytes_in == passes[1][1].bytes_in > 0 for _, phase in passes)
    assert all(phase.bytes_out == phase.bytes_in for _, phase in passes[1:])  # the first did not know what is wanted
    assert all(phase.peak_bytes <= there.peak_bytes for _, phase in passes)
    assert all(now <= then for now, then in zip(away, all_there, strict=True))
    assert min(now / then for now, then in zip(away, all_there, strict=True)) < 0.8
    assert_same(before, imprint(network))


@pytest.mark.parametrize("name", ["conditional", "cascade", "hunyuan"])
@torch.no_grad()
def test_copies_may_come_at_the_last_moment(name: str) -> None:
    network, inputs = made(name)
    untouched, _ = measured(network, inputs, Recorder(LoopbackDevice()))
    with waiting(network, LateCard()) as recorder:
        for _ in range(3):
            output, phase = measured(network, inputs, recorder)
            assert torch.equal(output, untouched)
            assert phase.bytes_out >= phase.bytes_in > 0


@torch.no_grad()
def test_a_network_that_keeps_nothing_is_left_alone() -> None:
    transformer = diffusers.DiTTransformer2DModel(
        **heads(), in_channels=4, num_layers=3, sample_size=16, num_embeds_ada_norm=8, norm_num_groups=8
    ).eval()
    labels = {"timestep": torch.tensor([3, 3]), "class_labels": torch.tensor([1, 1])}
    inputs = {"hidden_states": noise(2, 4, 16, 16), **labels}
    untouched, _ = measured(transformer, inputs, Recorder(LoopbackDevice()))
    with waiting(transformer) as recorder:
        measured(transformer, inputs, recorder)
        output, phase = measured(transformer, inputs, recorder)
    assert torch.equal(output, untouched)
    assert (phase.bytes_in, phase.bytes_out) == (0, 0)


class Doubting(nn.Module):
    """Keeps its first block's map, and changes it in place, or a view of it, while another block works."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.how = how

    def forward(self, hidden: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        kept = hidden = self.blocks[0](hidden)
        view = kept.view(-1) if self.how == "a view of it" else None
        hidden = self.blocks[2](self.blocks[1](hidden))
        if view is not None:
            view += 1
        elif self.how == "when it is back":
            kept += 1
            hidden = self.blocks[1](hidden)
        else:
            self.blocks[1](kept).add_(kept.mul_(2))
        return (self.blocks[3](hidden) + kept,)


@pytest.mark.parametrize("how", ["a view of it", "when it is back", "given to a block"])
@torch.no_grad()
def test_what_is_written_into_meanwhile_is_not_lost(how: str) -> None:
    network, inputs = Doubting(how), {"hidden": noise(64, 64)}
    untouched, _ = measured(network, inputs, Recorder(LoopbackDevice()))
    with waiting(network) as recorder:
        for _ in range(3):
            output, _ = measured(network, inputs, recorder)
            assert torch.equal(output, untouched)


class Returning(nn.Module):
    """Hands what it was given through a part, and writes into it when a block has worked."""

    def __init__(self) -> None:
        super().__init__()
        self.through = nn.Sequential(nn.Identity())
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, hidden: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        same = self.through(hidden)
        hidden = self.blocks[1](self.blocks[0](same + 1))
        same += 1
        return (hidden,)


@torch.no_grad()
def test_what_the_caller_gave_is_the_callers() -> None:
    network, given = Returning(), noise(64, 64)
    with waiting(network) as recorder:
        measured(network, {"hidden": given}, recorder)
    assert torch.equal(given, noise(64, 64) + 1)


@torch.no_grad()
def test_an_error_leaves_nothing_behind() -> None:
    network, inputs = made("conditional")
    ghosts: list[weakref.ref[torch.Tensor]] = []

    def fail(_: nn.Module, args: Any, kwargs: Any) -> None:
        ghosts.extend(weakref.ref(skip) for skip in kwargs["res_hidden_states_tuple"])
        raise ArithmeticError

    before = imprint(network)
    untouched, _ = measured(network, inputs, Recorder(LoopbackDevice()))
    with waiting(network) as recorder:
        handle = network.up_blocks[1].register_forward_pre_hook(fail, with_kwargs=True)
        with pytest.raises(ArithmeticError):
            measured(network, inputs, recorder)
        handle.remove()
        assert ghosts
        assert all(ghost() is None for ghost in ghosts)
        assert torch.equal(measured(network, inputs, recorder)[0], untouched)
    assert_same(before, imprint(network))


@torch.no_grad()
def test_ctrl_c_leaves_the_next_pass_as_it_should_be() -> None:
    network, inputs = made("conditional")
    untouched, _ = measured(network, inputs, Recorder(LoopbackDevice()))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with waiting(network, LateCard()) as recorder:
        measured(network, inputs, recorder)
        for block in (network.down_blocks[1], network.up_blocks[1]):
            handle = block.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                measured(network, inputs, recorder)
            handle.remove()
            output, phase = measured(network, inputs, recorder)
            assert torch.equal(output, untouched)
            assert phase.bytes_out == phase.bytes_in > 0


LINK = 8e9  # bytes a second


@pytest.fixture
def slow_link() -> Iterator[SimulatedCard]:
    """A card whose link is as slow as its arithmetic."""
    rates: dict[str, Any] = {"arithmetic_rates": {"float32": 1e12}, "memory_rate": 1e11, "link_rate": LINK}
    like = Accelerator(name="a card", kind="simulated", bytes=2**40, compute_capability="8.9", **rates)
    card = SimulatedCard(0, like, Host(), "shapes")
    use_cards([card])
    yield card
    use_cards(())


@torch.no_grad()
def test_from_the_second_pass_on_copies_pass_beside_the_arithmetic(slow_link: SimulatedCard) -> None:
    network, inputs = made("unconditional")
    sample, seconds = inputs["sample"].repeat(1, 1, 4, 4).to("privateuseone:0"), {}
    for moved in (False, True):
        fitted = fit(network, plan={"offload_activations": moved}, device="simulated:0")
        for number in range(3):
            network(sample, 3)
            trace = fitted.report().trace
            seconds[moved, number] = trace.seconds
        fitted.undo()
    crossing = (trace.phases[0].bytes_in + trace.phases[0].bytes_out) / LINK
    added = [seconds[True, number] - seconds[False, number] for number in range(3)]
    assert added[0] < 0.7 * crossing  # what goes need not be known
    assert max(added[1:]) < 0.3 * crossing < 0.1 * seconds[False, 2]


@torch.no_grad()
def test_on_a_card_of_its_own_memory() -> None:
    """Where host memory is not the device's, whatever came back too late would be an error."""
    network, inputs = made("unconditional")
    rates: dict[str, Any] = {"arithmetic_rates": {"float32": 50e12}, "memory_rate": 1e12, "link_rate": 25e9}
    like = Accelerator(name="a card", kind="simulated", bytes=2**40, compute_capability="8.9", **rates)
    use_cards([SimulatedCard(0, like, Host(), "real")])
    try:
        outputs, gone = [], []
        for moved in (False, True):
            fitted = fit(network, plan={"offload_activations": moved}, device="simulated:0")
            outputs.append(network(inputs["sample"].to("privateuseone:0"), 3).sample.to("cpu"))
            gone.append(fitted.report().trace.phases[0].bytes_out)
            fitted.undo()
    finally:
        use_cards(())
    assert torch.equal(*outputs)
    assert gone[1] > gone[0] == 0
