"""Attention: CUDA's choice among kernels, the CPU's numbers from each, and the bytes that each of them takes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulator.conftest import MakeCards
from tightfit.schema.attention import LEAST_DIMENSIONS
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors

HALF, FULL = torch.bfloat16, torch.float32
CUDNN, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
SEEDS = 24  # bytes that say with what random numbers began
SEED = 16 if torch.__version__ >= "2.14" else 0  # memory-efficient attention's, on the host before


def inputs(dtype: torch.dtype, *, length: int = 5, keys: int = 7, heads: int = 4, width: int = 8) -> list[torch.Tensor]:
    """Queries, keys and values, (batch, positions, heads, width) as diffusers has them."""
    torch.manual_seed(0)
    return [torch.randn(2, many, heads, width).to(dtype) for many in (length, keys, keys)]


def masks(dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(1)
    return {"none": None, "truth": torch.rand(2, 1, 1, 7) > 0.3, "added": torch.randn(2, 4, 5, 7).to(dtype)}


DIFFUSERS_BACKENDS = [
    ("native", HALF), ("native", FULL), ("_native_math", HALF), ("_native_math", FULL), ("_native_flash", HALF),
    ("_native_efficient", HALF), ("_native_efficient", FULL), ("_native_cudnn", HALF),
]  # fmt: skip


MASKS = ("none", "truth", "added")


@pytest.mark.parametrize(
    ("backend", "dtype", "mask"),
    [
        (*backend, mask)
        for backend in DIFFUSERS_BACKENDS
        for mask in MASKS
        if backend[0] != "_native_flash" or mask == "none"
    ],
    ids=str,
)
def test_every_backend_of_diffusers(backend: str, dtype: torch.dtype, mask: str, make_cards: MakeCards) -> None:
    parts, added = inputs(dtype), masks(dtype)[mask]
    on_cpu = "_native_math" if backend == "_native_math" else "native"  # the CPU has no other
    wanted = dispatch_attention_fn(*parts, attn_mask=added, backend=on_cpu)
    make_cards()
    there = [part.to("privateuseone") for part in parts]
    mask_there = None if added is None else added.to("privateuseone")
    assert torch.equal(dispatch_attention_fn(*there, attn_mask=mask_there, backend=backend).cpu(), wanted)
    make_cards(values="shapes")
    there = [torch.empty_like(part, device="privateuseone") for part in parts]
    mask_there = None if added is None else torch.empty_like(added, device="privateuseone")
    result = dispatch_attention_fn(*there, attn_mask=mask_there, backend=backend)
    assert (result.shape, result.dtype, result.device.type) == (wanted.shape, dtype, "privateuseone")


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"is_causal": True, "enable_gqa": True}],
    ids="-".join,
)
def test_settings(settings: dict[str, Any], dtype: torch.dtype, make_cards: MakeCards) -> None:
    make_cards()
    query, key, value = (part.transpose(1, 2) for part in inputs(dtype, keys=5))
    if "enable_gqa" in settings:
        key, value = key[:, :2], value[:, :2]
    wanted = F.scaled_dot_product_attention(query, key, value, **settings)
    there = [part.to("privateuseone") for part in (query, key, value)]
    result = F.scaled_dot_product_attention(*there, **settings).cpu()
    if dtype == FULL and "enable_gqa" in settings:  # for which CUDA only has plain products
        torch.testing.assert_close(result, wanted)
    else:
        assert torch.equal(result, wanted)


TAKEN = [  # kernel, compute capability, dtype, width of a head, anything else, and whether it is taken
    (FLASH, "8.9", HALF, 64, {}, True),
    (FLASH, "8.9", HALF, 20, {}, True),
    (FLASH, "8.9", HALF, 256, {}, True),
    (FLASH, "8.9", HALF, 512, {}, False),
    (FLASH, "8.9", FULL, 64, {}, False),
    (FLASH, "7.5", torch.float16, 64, {}, False),
    (FLASH, "8.9", HALF, 64, {"masked": True}, False),
    (FLASH, "8.9", HALF, 64, {"is_causal": True}, False),  # 5 queries, 7 keys
    (FLASH, "8.9", HALF, 64, {"enable_gqa": True}, True),
    (EFFICIENT, "8.9", HALF, 512, {}, True),
    (EFFICIENT, "8.9", HALF, 20, {}, False),
    (EFFICIENT, "8.9", FULL, 20, {}, True),
    (EFFICIENT, "8.9", FULL, 18, {}, False),
    (EFFICIENT, "6.1", FULL, 18, {}, True),
    (EFFICIENT, "7.5", torch.float16, 20, {}, False),
    (EFFICIENT, "7.5", HALF, 64, {}, False),
    (EFFICIENT, "8.9", torch.float64, 64, {}, False),
    (EFFICIENT, "8.9", HALF, 64, {"masked": True}, True),
    (EFFICIENT, "8.9", HALF, 64, {"enable_gqa": True}, False),
    (CUDNN, "8.9", HALF, 128, {"masked": True}, True),
    (CUDNN, "8.9", HALF, 136, {}, False),
    (CUDNN, "8.9", FULL, 64, {}, False),
    (CUDNN, "7.5", torch.float16, 64, {}, False),
    (MATH, "6.1", torch.float64, 18, {"enable_gqa": True}, True),
]


@pytest.mark.parametrize(("kernel", "capability", "dtype", "width", "settings", "taken"), TAKEN, ids=str)
def test_which_kernel_takes_what(
    kernel: SDPBackend,
    capability: str,
    dtype: torch.dtype,
    width: int,
    settings: dict[str, Any],
    taken: bool,
    make_cards: MakeCards,
) -> None:
    make_cards(values="shapes", capability=capability)
    query, key, value = (part.transpose(1, 2).to("privateuseone") for part in inputs(dtype, width=width))
    if "enable_gqa" in settings:
        key, value = key[:, :2], value[:, :2]
    settings = dict(settings)
    mask = torch.ones(5, 7, dtype=torch.bool, device="privateuseone") if settings.pop("masked", False) else None
    refused = pytest.raises(RuntimeError, match=r"No available kernel.* allow SDPBackend\.MATH")
    with sdpa_kernel(kernel), contextlib.nullcontext() if taken else refused:
        result = F.scaled_dot_product_attention(query, key, value, mask, **settings)
        assert result.shape == (2, 4, 5, width)


def held(card: SimulatedCard, *args: Any, **settings: Any) -> int:
    """The most bytes that attention takes beyond its inputs."""
    free_dead_tensors()
    before = card.allocator.requested.now
    card.allocator.requested.reset_peak()
    F.scaled_dot_product_attention(*args, **settings)
    return card.allocator.requested.peak - before


def three(dtype: torch.dtype, heads: int, length: int, width: int) -> list[torch.Tensor]:
    return [torch.empty(1, length, heads, width, dtype=dtype, device="privateuseone").transpose(1, 2) for _ in range(3)]


def test_flash_leaves_a_number_for_each_query(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    parts = three(HALF, 24, 4096, 128)
    output, rows = parts[0].nbytes, 4 * 24 * 4096
    assert held(card, *parts) == output + rows + SEEDS
    padded = three(HALF, 24, 4096, 100)  # to 104
    assert held(card, *padded) == 4 * 2 * 24 * 4096 * 104 + rows + SEEDS


@pytest.mark.skipif(LEAST_DIMENSIONS == 4, reason="torch takes four dimensions only")
def test_three_dimensions_are_one_item(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    parts = [part[0] for part in three(FULL, 8, 1024, 64)]
    mask = torch.zeros(8, 1024, 1024, device="privateuseone")
    for given in ({}, {"attn_mask": mask}):
        assert held(card, *parts, **given) == parts[0].nbytes + SEED
    make_cards()
    here = [torch.randn(4, 16, 8) for _ in range(3)]
    there = F.scaled_dot_product_attention(*(part.to("privateuseone") for part in here))
    assert (there.cpu() - F.scaled_dot_product_attention(*here)).abs().max() < 1e-6


def test_flash_lays_its_output_out_like_the_queries(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    parts = three(HALF, 24, 64, 128)
    assert F.scaled_dot_product_attention(*parts).transpose(1, 2).is_contiguous()
    assert F.scaled_dot_product_attention(*(part.contiguous() for part in parts)).is_contiguous()
    with sdpa_kernel(EFFICIENT):
        assert F.scaled_dot_product_attention(*(part.contiguous() for part in parts)).transpose(1, 2).is_contiguous()


def test_memory_efficient_attention_adds_up_wide_heads(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    for dtype, factor in ((FULL, 1), (HALF, 3)):  # the middle of an autoencoder: one head, 16 bits and 32 beside them
        parts = three(dtype, 1, 4096, 512)
        assert held(card, *parts) == factor * parts[0].nbytes + SEED
    parts = three(FULL, 8, 1024, 64)
    assert held(card, *parts) == parts[0].nbytes + SEED


@pytest.mark.parametrize("length", [1024, 1027])
def test_masks_are_converted_and_extended(length: int, make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    parts = three(HALF, 8, length, 64)
    output = parts[0].nbytes
    truth = torch.empty(1, 1, length, length, dtype=torch.bool, device="privateuseone")
    converted, extended = 2 * length**2, 2 * length * (length + 5) if length % 8 else 0
    assert held(card, *parts, attn_mask=truth) == max(converted + extended, (extended or converted) + output + SEED)
    added = torch.empty(1, 1, length, length, dtype=HALF, device="privateuseone")
    assert held(card, *parts, attn_mask=added) == extended + output + SEED


def test_plain_products_hold_their_scores(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    parts = three(HALF, 8, 1024, 64)
    scores, wide = 4 * 8 * 1024**2, 2 * parts[0].nbytes
    fused = held(card, *parts)
    with sdpa_kernel(MATH):
        plain = held(card, *parts)
    assert fused < scores
    assert 2 * scores + 3 * wide <= plain < 3 * scores


def test_what_cudnn_takes_on_newer_cards_has_no_rows(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes", capability="9.0")
    parts = three(HALF, 24, 4096, 128)
    assert held(card, *parts) == parts[0].nbytes + 16
    with sdpa_kernel([FLASH, CUDNN], set_priority=True):
        assert held(card, *parts) == parts[0].nbytes + 4 * 24 * 4096 + SEEDS


def test_a_card_that_plays_a_cpu_has_the_cpus_kernels(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes", kind="cpu")
    for width in (64, 18):
        parts = three(FULL, 8, 1024, width)
        assert held(card, *parts) == parts[0].nbytes + 4 * 8 * 1024
    assert held(card, *parts, dropout_p=0.5) > 4 * 8 * 1024**2
    (card,) = make_cards(kind="cpu")
    query, key, value = (part.transpose(1, 2) for part in inputs(FULL, width=18))
    wanted = F.scaled_dot_product_attention(query, key, value)
    result = F.scaled_dot_product_attention(*(part.to("privateuseone") for part in (query, key, value)))
    assert torch.equal(result.cpu(), wanted)
    assert result.stride() == wanted.stride()
    refused = pytest.raises(RuntimeError, match=r"No available kernel.* on the CPU: allow SDPBackend\.MATH")
    with sdpa_kernel(EFFICIENT), refused:
        F.scaled_dot_product_attention(*parts)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_operations_that_are_called_by_name(name: str, make_cards: MakeCards) -> None:
    make_cards()
    query, key, value = (part.transpose(1, 2).contiguous() for part in inputs(HALF))
    wanted, rows = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    there = [part.to("privateuseone") for part in (query, key, value)]
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    result = op(*there) if name == "flash" else op(*there, None, True)
    assert torch.equal(result[0].cpu(), wanted)
    assert torch.equal(result[1].cpu().reshape(2, 4, -1)[..., :5], rows)


def test_different_dtypes_are_refused(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    query, key, value = three(HALF, 2, 8, 8)
    with pytest.raises(RuntimeError, match=r"same dtype, but got torch\.float32, torch\.bfloat16"):
        F.scaled_dot_product_attention(query.float(), key, value)
