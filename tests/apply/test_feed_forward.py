"""Feed-forwards some tokens at a time: which they are, the same numbers, less memory, no more bytes moved."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention import Attention, FeedForward, LuminaFeedForward
from torch import nn

from inspection import assert_same, imprint, relative_error
from more_pipelines import MORE_CASES
from tightfit import fit
from tightfit.apply.activations.ffn_chunking import chunk_feed_forwards, find_feed_forwards, inside_feed_forwards
from tightfit.apply.weights import weight_groups as groups
from tightfit.schema.results import PhaseTrace
from tiny_pipelines import CASES, TinyCase

WIDTH = 32
ROUNDING = 1e-5  # relative, float32
SIZE = 4096  # bytes of inner maps
SQUARE = {"height": 32, "width": 32}


def named(name: str) -> TinyCase:
    return next(case for case in (*CASES, *MORE_CASES) if case.name == name)


def in_block(module: nn.Module) -> nn.Module:
    """A network whose only block has `module` in it, beside a layer that mixes nothing and widens nothing."""
    network = nn.Module()
    network.blocks = nn.ModuleList([nn.Sequential(module, nn.Linear(WIDTH, WIDTH))])
    return network


def counted(module: nn.Module) -> list[int]:
    """How many tokens each of the coming passes of the first linear layer in `module` is given."""
    seen: list[int] = []
    layer = next(part for part in module.modules() if isinstance(part, nn.Linear))
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    return seen


@pytest.mark.parametrize("kind", ["gelu", "gelu-approximate", "geglu", "geglu-approximate", "swiglu", "lumina"])
@pytest.mark.parametrize("shape", [(1, 100, WIDTH), (3, 100, WIDTH), (100, WIDTH)], ids=str)
@torch.no_grad()
def test_every_kind_gives_the_same_in_chunks(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lumina = kind == "lumina"
    module = LuminaFeedForward(WIDTH, 4 * WIDTH, multiple_of=32) if lumina else FeedForward(WIDTH, activation_fn=kind)
    tokens, (found,) = torch.randn(shape), find_feed_forwards(in_block(module))
    assert found[0] is module
    untouched = module(tokens)
    with ExitStack() as undo:
        each = 7 * found[1] * tokens.itemsize * (shape[0] if len(shape) == 3 else 1)
        chunk_feed_forwards(in_block(module), each, undo)
        output = module(tokens)
        seen = counted(module)
        assert torch.equal(module(tokens), output)
    assert seen == [7] * 14 + [2]
    assert relative_error(output, untouched) <= ROUNDING
    seen.clear()
    assert torch.equal(module(tokens), untouched)
    assert seen == [100]


FOUND = {
    "StableDiffusionXL": (8, "FeedForward"),
    "StableDiffusion3": (5, "FeedForward"),  # the last block has none for the prompt
    "Flux": (4, "FeedForward"),
    "Wan": (3, "FeedForward"),
    "HiDreamImage": (21, "HiDreamImageFeedForwardSwiGLU"),
}


@pytest.mark.parametrize("name", FOUND)
def test_which_they_are(name: str) -> None:
    pipe: Any = named(name).make()
    network = getattr(pipe, "transformer", None) or pipe.unet
    found = [type(module).__name__ for module, _ in find_feed_forwards(network)]
    assert (len(found), {*found}) == (FOUND[name][0], {FOUND[name][1]})


def test_no_trace_is_left() -> None:
    network: Any = named("Flux").make().components["transformer"]
    before = imprint(network)
    with ExitStack() as undo:
        chunk_feed_forwards(network, SIZE, undo)
        changed = zip(imprint(network).classes, before.classes, strict=True)
        assert sum(now is not then for now, then in changed) == FOUND["Flux"][0]
    assert_same(before, imprint(network))


def denoise(
    case: TinyCase, size: int | None, *, count: bool = True, **settings: Any
) -> tuple[torch.Tensor, PhaseTrace]:
    """The second call's pictures and denoising at level 3; inner maps of `size` bytes (None: whole)."""
    pipe: Any = case.make()
    fitted = fit(pipe, level=3, device="loopback", count_activations=count)
    with ExitStack() as undo:
        if size is not None:
            chunk_feed_forwards(pipe.transformer, size, undo)
        _, output = (pipe(**{**case.call(), "output_type": "latent", **settings})[0] for _ in range(2))
    return output, next(phase for phase in fitted.report().trace.phases if phase.name == "denoise")


@pytest.mark.parametrize("name", ["LTX", "PixArtSigma"])
def test_the_peak_falls_and_no_weight_travels_more_often(name: str) -> None:
    untouched, whole = denoise(named(name), None, **SQUARE)
    output, chunked = denoise(named(name), SIZE, **SQUARE)
    assert relative_error(output, untouched) <= ROUNDING
    assert chunked.peak_bytes < 0.95 * whole.peak_bytes
    assert chunked.bytes_in == whole.bytes_in
    assert chunked.on_demand == 0


def test_weights_wait_behind_their_feed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are called in an order that nobody knows: only then does it matter that they wait for all tokens."""
    _, whole = denoise(named("HiDreamImage"), None, count=False)
    monkeypatch.setattr(groups, "compiled_around", inside_feed_forwards)
    _, chunked = denoise(named("HiDreamImage"), SIZE, count=False)
    assert chunked.bytes_in <= whole.bytes_in


class Mixing(FeedForward):
    """Made of the parts of a feed-forward; but its tokens see each other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mixed: torch.Tensor = super().forward(hidden_states - hidden_states.mean(-2, keepdim=True))
        return mixed


@torch.no_grad()
def test_tokens_that_see_each_other_stay_together() -> None:
    torch.manual_seed(0)
    module, tokens = Mixing(WIDTH), torch.randn(2, 100, WIDTH)
    untouched = module(tokens)
    with ExitStack() as undo:
        chunk_feed_forwards(in_block(module), SIZE, undo)
        assert torch.equal(module(tokens), untouched)


def test_attention_is_none() -> None:
    fused = Attention(WIDTH, heads=2, dim_head=16)
    fused.fuse_projections()
    for module in (Attention(WIDTH, heads=2, dim_head=16), fused, diffusers.models.embeddings.TimestepEmbedding(8, 32)):
        assert not [*find_feed_forwards(in_block(module))]


class Shifted(FeedForward):
    """Adds something of its own to each token."""

    def forward(self, hidden_states: torch.Tensor, shift: Any = None, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = super().forward(hidden_states + shift)
        return made


@torch.no_grad()
def test_what_takes_more_than_tokens_is_left_alone() -> None:
    module, tokens = Shifted(WIDTH), torch.randn(1, 100, WIDTH)
    with ExitStack() as undo:
        chunk_feed_forwards(in_block(module), SIZE, undo)
        seen = counted(module)
        module(tokens, shift=tokens)
    assert seen == [100]
