"""A batch a few items at a time: the same numbers as whole, less memory, and whole where items are not alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import PAGIdentitySelfAttnProcessor2_0
from torch import nn

from inspection import assert_same, imprint, relative_error
from more_pipelines import MORE_CASES
from tightfit import RunError, fit
from tightfit.apply.activations.max_batch import chunk_blocks, in_chunks
from tightfit.apply.method_overrides import override_class_members
from tightfit.devices.device import LoopbackDevice
from tightfit.measure.modules import find_blocks
from tightfit.measure.recorder import Recorder
from tiny_pipelines import CASES, TinyCase, _unet, heads

ROUNDING = 1e-5  # relative, float32


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def denoisers(pipe: Any) -> list[nn.Module]:
    named = (getattr(pipe, name, None) for name in ("unet", "transformer", "controlnet"))
    return [network for network in named if network is not None]


def chunked(network: nn.Module, size: int, told: Callable[[str], object] = lambda what: None) -> list[int]:
    """Lets `network` work on `size` items at a time; returns how many it gets in each of its passes to come."""
    seen: list[int] = []
    plain = type(network).__call__

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample"))
        seen.append(len(first))
        return plain(self, *args, **kwargs)

    override_class_members(network, __call__=in_chunks(watched, size, told))
    return seen


QUICK = {"num_inference_steps": 1, "height": 32, "width": 32, "output_type": "latent"}
PICTURES = {"num_images_per_prompt": 3}
BATCHES: dict[str, dict[str, Any]] = {
    "StableDiffusion": PICTURES,
    "StableDiffusionXL": PICTURES,  # more conditions in a dict
    "StableDiffusion3": PICTURES,
    "StableDiffusionControlNet": PICTURES,  # residuals in a list
    "Flux": PICTURES,  # tables of positions
    "QwenImage": PICTURES,  # sizes of each picture in a list
    "HiDreamImage": PICTURES,  # items along the second dimension
    "Wan": {"num_videos_per_prompt": 3},
    "CogVideoX": {},
    "LTXImageToVideo": {},  # a time for each token
}


def latents(case: TinyCase, pipe: Any) -> torch.Tensor:
    drawn: torch.Tensor = pipe(**{**case.call(), **BATCHES[case.name], **QUICK})[0]
    return drawn


def counting(forward: Callable[..., Any], seen: set[int]) -> Callable[..., Any]:
    """`forward` of a block; how many rows of maps it is given goes to `seen`."""

    @functools.wraps(forward)
    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["hidden_states"]
        seen.update([len(first)] if isinstance(first, torch.Tensor) and first.ndim >= 3 else [])
        return forward(block, *args, **kwargs)

    return run


@pytest.mark.parametrize("name", BATCHES)
def test_the_same_numbers_as_whole(name: str) -> None:
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe, size, notes, rows = case.make(), 2 if BATCHES[name] else 1, list[str](), set[int]()
    whole, before = latents(case, pipe), imprint(pipe)
    with ExitStack() as undo:
        for network in denoisers(pipe):
            for block in find_blocks(network).values():
                undo.callback(override_class_members(block, forward=counting(type(block).forward, rows)))
            chunk_blocks(network, 1, undo, notes.append)
        assert relative_error(latents(case, pipe), whole) <= ROUNDING
    assert 1 in rows
    assert not rows & {2, 3, 6}
    assert_same(before, imprint(pipe))
    for network in denoisers(pipe):
        seen = chunked(network, size, notes.append)
    assert relative_error(latents(case, pipe), whole) <= ROUNDING
    assert max(seen) == size
    assert len(seen) >= 2
    assert notes == []


@torch.no_grad()
def test_the_peak_is_that_of_a_chunk() -> None:
    unet, recorder = _unet(cross_attention_dim=16).eval(), Recorder(LoopbackDevice())
    inputs = {"sample": noise(8, 4, 16, 16), "timestep": 3, "encoder_hidden_states": noise(8, 5, 16)}

    def peak() -> int:
        with recorder.call():
            recorder.enter("denoise")
            unet(**inputs)
            return recorder.trace().peak_bytes

    whole = peak()
    with ExitStack() as undo:
        chunk_blocks(unet, 2, undo)
        assert peak() < 0.6 * whole  # skips are there for the whole batch
    chunked(unet, 2)
    assert peak() < 0.35 * whole


def test_weights_come_once_for_all_chunks_of_a_block() -> None:
    case, moved = next(case for case in CASES if case.name == "StableDiffusion"), []
    for size in (None, 1):
        pipe: Any = case.make()
        plan = {"level": 3, "offload_activations": False, "components": {"unet": {"granularity": "block"}}}
        fitted = fit(pipe, plan=plan, device="loopback", count_activations=False)
        with ExitStack() as undo:
            if size:
                chunk_blocks(pipe.unet, size, undo)
            for _ in range(2):
                pipe(**{**case.call(), **PICTURES, **QUICK, "num_inference_steps": 2})
        moved.append(next(phase.bytes_in for phase in fitted.report().trace.phases if phase.name == "denoise"))
    assert moved[1] == moved[0]


@torch.no_grad()
def test_tables_are_known_even_where_they_have_as_many_rows() -> None:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        **heads(),
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    inputs = {
        "hidden_states": noise(4, 4, 16),
        "encoder_hidden_states": noise(4, 4, 32),
        "pooled_projections": noise(4, 16),
        "timestep": torch.rand(4),
        "img_ids": torch.arange(12.0).view(4, 3),
        "txt_ids": torch.arange(12.0).view(4, 3) + 1,
    }
    whole = transformer(**inputs).sample
    seen = chunked(transformer, 1)
    assert relative_error(transformer(**inputs).sample, whole) <= ROUNDING
    assert seen == [1] * 4


@torch.no_grad()
def test_what_comes_by_frames_goes_along() -> None:
    """AnimateDiff repeats prompts for each frame."""
    torch.manual_seed(0)
    unet = diffusers.UNetMotionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        cross_attention_dim=16,
        num_attention_heads=2,
        motion_num_attention_heads=2,
    ).eval()
    frames, prompts = noise(3, 4, 2, 16, 16), noise(3, 5, 16).repeat_interleave(2, dim=0)
    whole = unet(frames, 3, prompts)
    seen = chunked(unet, 2)
    output = unet(frames, 3, prompts)
    assert type(output) is type(whole)
    assert relative_error(output.sample, whole.sample) <= ROUNDING
    assert seen == [2, 1]


class Denoiser(nn.Module):
    """Gives its items back, doubled, in the way of `shape`."""

    def __init__(self, shape: Callable[[torch.Tensor], Any] = lambda made: (made,)) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, sample: torch.Tensor, other: Any = None, layers: Any = None) -> Any:
        return self.shape(2 * sample)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_outputs_are_laid_out_as_they_were(layout: torch.memory_format) -> None:
    network, sample = Denoiser(), noise(4, 3, 8, 8).to(memory_format=layout)
    (whole,) = network(sample)
    chunked(network, 3)
    (output,) = network(sample)
    assert torch.equal(output, whole)
    assert output.stride() == whole.stride()
    assert not output._is_view()  # a view keeps what it was made of


def test_several_outputs_and_none() -> None:
    network, sample = Denoiser(lambda made: (made, [None, made[:, 0]])), noise(4, 3, 8, 8)
    chunked(network, 3)
    made, (nothing, first) = network(sample)
    assert nothing is None
    assert torch.equal(made, 2 * sample)
    assert torch.equal(first, made[:, 0])


def test_an_output_that_is_not_by_items_is_an_error() -> None:
    network = Denoiser(lambda made: (made.sum(),))
    chunked(network, 3)
    with pytest.raises(RunError, match=r"3 items gave a tensor of \(\)"):
        network(noise(4, 3, 8, 8))


def test_where_items_may_not_be_alike_the_batch_stays_whole() -> None:
    sample = noise(4, 3, 8, 8)
    looking = Denoiser()
    looking.attn = nn.Module()
    looking.attn.processor = PAGIdentitySelfAttnProcessor2_0()
    cached = Denoiser()
    diffusers.hooks.HookRegistry.check_if_exists_or_initialize(cached).register_hook(diffusers.hooks.ModelHook(), "it")
    cases = [
        (looking, {}, "PAGIdentitySelfAttnProcessor2_0 may look at several items"),
        (cached, {}, "hooks of diffusers keep"),
        (Denoiser(), {"other": [object()]}, "it is given a object"),
        (Denoiser(), {"layers": noise(4, 4, 5, 6)}, "either of the first two dimensions"),
    ]
    for network, given, reason in cases:
        notes: list[str] = []
        seen = chunked(network, 1, notes.append)
        assert torch.equal(network(sample, **given)[0], 2 * sample)
        assert seen == [4]
        assert len(notes) == 1
        assert notes[0].startswith("a batch of 4 was denoised as a whole: ")
        assert reason in notes[0]


def test_small_batches_pass_through() -> None:
    network = Denoiser()
    seen = chunked(network, 4)
    for count in (1, 4):
        network(noise(count, 3, 8, 8))
    network(noise(6, 3))  # no batch of maps: nobody knows what that is
    assert seen == [1, 4, 6]
