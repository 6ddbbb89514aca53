"""Chunked attention: the numbers of plain products, without their matrix of scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit import InputError
from tightfit.apply.activations.chunked_attention import chunked_attention
from tightfit.measure.meter import TensorMeter

SHAPES = {
    "usual": ((2, 3, 37, 8), (2, 3, 29, 8), (2, 3, 29, 8)),
    "other values": ((2, 3, 37, 8), (2, 3, 29, 8), (2, 3, 29, 5)),
    "one batch of keys": ((2, 3, 37, 8), (1, 3, 29, 8), (1, 3, 29, 8)),
    "two dimensions": ((37, 8), (29, 8), (29, 8)),
    "three dimensions": ((3, 37, 8), (3, 29, 8), (3, 29, 8)),
    "five dimensions": ((2, 2, 3, 37, 8), (2, 2, 3, 29, 8), (2, 2, 3, 29, 8)),
    "one query": ((2, 3, 1, 8), (2, 3, 29, 8), (2, 3, 29, 8)),
}
BLOCKS = (1200, 5000, 20_000, 10**7)  # some rows, a head, an item, everything
EPSILON = torch.finfo(torch.float32).eps


def plain(*inputs: Any, **settings: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, **settings)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_rounding(result: torch.Tensor, wanted: torch.Tensor) -> None:
    """Values of about one, summed in another order."""
    torch.testing.assert_close(result, wanted, rtol=0, atol=8 * EPSILON)


def masks(queries: int, keys: int, leading: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(*leading, queries, keys, generator=generator)
    some = {"truth": uniform > 0.5, "added": uniform * 4 - 2, "infinite": torch.where(uniform > 0.9, -math.inf, 0.0)}
    narrow = {"truth of keys": uniform[..., :1, :] > 0.5, "truth of queries": uniform[..., :1] > 0.5}
    return {**some, **narrow, "for all": uniform[(0,) * len(leading)], "half": (uniform * 4).half()}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_as_plain_products_whatever_the_block(shapes: tuple[tuple[int, ...], ...]) -> None:
    query, key, value = drawn(*shapes)
    kinds: list[tuple[torch.Tensor | None, bool]] = [(None, False), (None, True)]
    kinds += [(mask, False) for mask in masks(query.shape[-2], 29, query.shape[:-2]).values()]
    for mask, causal in kinds:
        added = mask if mask is None or mask.dtype == torch.bool else mask.float()  # torch wants the queries' dtype
        scale = 0.3 if causal else None
        wanted = plain(query, key, value, added, 0.0, causal, scale=scale)
        for block in BLOCKS:
            result = chunked_attention(query, key, value, mask, 0.0, causal, scale, chunk_bytes=block)
            assert result.shape == wanted.shape
            assert_rounding(result, wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_heads", [2, 3])
def test_heads_that_are_shared(causal: bool, value_heads: int) -> None:
    query, key, value = drawn((2, 6, 37, 8), (2, 2, 29, 8), (2, value_heads, 29, 8))
    alone = (key.repeat_interleave(3, 1), value.repeat_interleave(6 // value_heads, 1))
    wanted = plain(query, *alone, is_causal=causal)
    for block in BLOCKS:
        assert_rounding(chunked_attention(query, key, value, None, 0.0, causal, None, True, chunk_bytes=block), wanted)


def test_inputs_that_lie_in_memory_as_networks_have_them() -> None:
    query, key, value = (part.transpose(1, 2) for part in drawn((2, 37, 3, 8), (2, 29, 3, 8), (2, 29, 3, 8)))
    before = [part.clone() for part in (query, key, value)]
    assert_rounding(chunked_attention(query, key.mT.contiguous().mT, value, chunk_bytes=1000), plain(query, key, value))
    assert all(torch.equal(part, then) for part, then in zip((query, key, value), before, strict=True))


def test_a_block_is_at_least_one_row() -> None:
    parts = drawn(*SHAPES["usual"])
    assert_rounding(chunked_attention(*parts, chunk_bytes=1), plain(*parts))


def test_float64_stays_float64() -> None:
    parts = drawn(*SHAPES["usual"], dtype=torch.float64)
    torch.testing.assert_close(chunked_attention(*parts, chunk_bytes=1200), plain(*parts), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_less_exact_than_plain_products(dtype: torch.dtype) -> None:
    """Their errors differ from draw to draw, by some per cent in either direction."""
    parts = drawn((8, 2, 200, 64), (8, 2, 300, 64), (8, 2, 300, 64), dtype=dtype)
    exact = plain(*(part.double() for part in parts))
    result = chunked_attention(*parts, chunk_bytes=50_000)
    assert result.dtype == dtype
    errors = [float((value.double() - exact).square().mean().sqrt()) for value in (result, plain(*parts))]
    assert errors[0] <= 1.02 * errors[1], errors


def test_rows_that_see_nothing_are_zeros_as_in_torch_and_nan_stays() -> None:
    query, key, value = drawn((1, 2, 8, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    query[0, 0, 5, 0] = math.nan
    sees = torch.ones(8, 6, dtype=torch.bool)
    sees[2] = False
    for mask in (sees, torch.where(sees, 0.0, -math.inf)):
        wanted = plain(query, key, value, mask)
        assert not wanted[0, :, 2].any()
        assert wanted[0, 0, 5].isnan().all()
        for block in BLOCKS:
            result = chunked_attention(query, key, value, mask, chunk_bytes=block)
            torch.testing.assert_close(result, wanted, rtol=0, atol=8 * EPSILON, equal_nan=True)


def test_nothing_to_attend_to() -> None:
    query, key, value = drawn((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8))
    assert torch.equal(chunked_attention(query, key, value, chunk_bytes=1000), plain(query, key, value))
    assert chunked_attention(query[:, :, :0], *drawn((1, 2, 4, 8), (1, 2, 4, 8)), chunk_bytes=1000).shape == (
        1,
        2,
        0,
        8,
    )


def peak_of(tokens: int, mask: torch.Tensor | None, dtype: torch.dtype, block: int, causal: bool) -> int:
    """Bytes above inputs and output."""
    query, key, value = drawn(*((1, 2, tokens, 16),) * 3, dtype=dtype)
    now = most = 0

    def count(difference: int) -> None:
        nonlocal now, most
        now += difference
        most = max(most, now)

    with TensorMeter(count):
        result = chunked_attention(query, key, value, mask, 0.0, causal, chunk_bytes=block)
    return most - result.nbytes


@pytest.mark.parametrize("kind", ["none", "causal", "truth", "truth for each head", "added", "half"])
def test_the_peak_does_not_grow_with_the_square_of_the_length(kind: str) -> None:
    block, peaks = 2**16, {}
    for tokens in (512, 2048):
        shape = (1, 2 if "head" in kind else 1, tokens, tokens)
        mask = None if kind in ("none", "causal", "half") else torch.zeros(1).expand(shape)
        mask = mask == 0 if mask is not None and "truth" in kind else mask
        dtype = torch.bfloat16 if kind == "half" else torch.float32
        peaks[tokens] = peak_of(tokens, mask, dtype, block, kind == "causal")
        heads = 3 * tokens * 16 * 4  # queries of a block; keys and values of its head, widened
        assert peaks[tokens] <= 2.25 * block + block / 2 + heads, peaks
    assert peaks[2048] < 2.5 * peaks[512] < 2048 * 2048 * 2 * 4 / 32, peaks


def test_what_is_for_training_is_refused() -> None:
    query, key, value = drawn((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8))
    with pytest.raises(InputError, match=r"dropout_p=0, not 0\.1") as told:
        chunked_attention(query, key, value, None, 0.1, chunk_bytes=1000)
    assert told.value.facts == {"dropout": 0.1}
    with pytest.raises(InputError, match=r"\(1, 2, 3, 8\) has no gradients"):
        chunked_attention(query.requires_grad_(), key, value, chunk_bytes=1000)
    with torch.no_grad():
        chunked_attention(query, key, value, chunk_bytes=1000)


def test_masks_that_do_not_fit_are_refused_as_by_torch() -> None:
    query, key, value = drawn((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with pytest.raises(RuntimeError, match="expand"):
        chunked_attention(query, key, value, torch.zeros(3, 5), chunk_bytes=1000)
