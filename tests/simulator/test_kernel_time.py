"""How long kernels take on a device, term by term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightfit.schema.kernel_time import kernel_seconds
from tightfit.schema.machine import Accelerator, Amounts
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost

MakeCards = Callable[..., list[SimulatedCard]]
TERA = 10**12
PLAIN = Accelerator(
    name="a card", kind="simulated", bytes=2**34, arithmetic_rates={"float16": 1e12}, memory_rate=1e12
)  # fmt: skip
CARD = PLAIN.model_copy(
    update={"multiprocessors": 100, "clock": 1e9, "tail": 0.5, "cache_bytes": 10**6, "cache_rate": 4e12}
)


def seconds(device: Accelerator, kernels: int = 1, **amounts: int) -> float:
    return kernel_seconds(device, "matmul", "float16", Amounts(**{"operations": 0, "traffic": 0} | amounts), kernels)


def test_the_longer_of_arithmetic_and_traffic_counts() -> None:
    assert seconds(PLAIN, operations=2 * TERA, traffic=TERA) == pytest.approx(2)
    assert seconds(PLAIN, operations=TERA, traffic=3 * TERA) == pytest.approx(3)
    assert seconds(CARD, operations=TERA, traffic=3 * TERA) == pytest.approx(3)  # far more than the cache holds


def test_what_is_not_known_of_a_device_takes_no_time() -> None:
    assert seconds(PLAIN, tile_operations=TERA, exponentials=TERA, serial=TERA, divisions=TERA) == 0


def test_the_last_tiles_take_part_of_a_wave_but_never_more_than_that_part_of_the_product() -> None:
    many = seconds(CARD, operations=TERA, tile_operations=10**8)  # 10,000 tiles, a wave is 100 of them
    few = seconds(CARD, operations=10**8, tile_operations=10**8)  # a single tile
    assert many == pytest.approx(1 + 0.5 * 0.01)
    assert few == pytest.approx(1.5e-4)


def test_exponentials_come_beside_products() -> None:
    assert seconds(CARD, operations=TERA, exponentials=16 * 10**11) == pytest.approx(2)


def test_padding_is_computed_too() -> None:
    assert seconds(PLAIN, operations=TERA, padding=TERA) == pytest.approx(2)


def test_small_tensors_are_read_from_the_cache() -> None:
    assert seconds(CARD, traffic=10**5) == pytest.approx(10**5 * (0.9 / 4e12 + 0.1 / 1e12))
    ten = seconds(CARD, kernels=10, traffic=10**6)
    assert ten == pytest.approx(10 * seconds(CARD, traffic=10**5))


def test_copies_to_another_layout_come_before_and_after() -> None:
    assert seconds(PLAIN, operations=TERA, traffic=TERA, copied=TERA) == pytest.approx(2)


def test_one_block_reads_its_values_one_after_another() -> None:
    assert seconds(CARD, traffic=10**9, serial=64 * 10**7) == pytest.approx(1)


def test_the_place_of_each_element_is_computed_beside_its_traffic() -> None:
    assert seconds(CARD, traffic=10**9, divisions=12 * 10**10) == pytest.approx(1)
    assert seconds(CARD, traffic=10**12, divisions=12 * 10**10) == pytest.approx(1)


def test_each_kernel_begins_and_ends() -> None:
    device = CARD.model_copy(update={"kernel_latency": 1e-3})
    assert seconds(device, kernels=7, traffic=10**9) == pytest.approx(7e-3 + seconds(CARD, kernels=7, traffic=10**9))


# what the simulator counts


def costs(card: SimulatedCard, work: Callable[[], Any]) -> list[KernelCost]:
    found: list[KernelCost] = []
    card.kernel_callbacks.append(found.append)
    try:
        work()
    finally:
        card.kernel_callbacks.remove(found.append)
    return found


def on_card(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="privateuseone")


def test_a_product_has_tiles_of_128_rows_and_columns(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    rows, weight = on_card(1000, 640), on_card(320, 640)
    (cost,) = costs(card, lambda: F.linear(rows, weight))
    assert cost.amounts.operations == 2 * 1000 * 320 * 640
    assert cost.amounts.tile_operations == 2 * 128 * 128 * 640


def test_attention_pads_heads_and_counts_its_scores(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    query = on_card(2, 8, 256, 40)
    (cost,) = costs(card, lambda: F.scaled_dot_product_attention(query, query, query))
    scores = 2 * 8 * 256 * 256
    assert cost.amounts.exponentials == scores
    assert cost.amounts.operations == 4 * scores * 40
    assert cost.amounts.padding == 4 * scores * 24


def test_attention_with_a_mask_is_another_kind(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    query, mask = on_card(1, 2, 64, 64), on_card(1, 1, 64, 64)
    kinds = [each.kind for each in costs(card, lambda: F.scaled_dot_product_attention(query, query, query, mask))]
    assert "efficient-attention" in kinds
    assert "attention" not in kinds


def test_a_convolution_copies_what_lies_channels_first(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    picture, weight = on_card(1, 16, 32, 32), on_card(32, 16, 3, 3)
    (cost,) = costs(card, lambda: F.conv2d(picture, weight, padding=1))
    sizes = [16 * 32 * 32, 32 * 32 * 32, 32 * 16 * 9]
    assert cost.amounts.copied == 2 * 2 * sum(sizes)
    last = torch.channels_last
    laid = [each.contiguous(memory_format=last) for each in (picture, weight)]
    (cost,) = costs(card, lambda: F.conv2d(*laid, padding=1))
    assert cost.amounts.copied == 0


def test_group_norm_reads_each_group_by_one_block(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    picture = on_card(2, 64, 16, 16)
    cost = next(each for each in costs(card, lambda: F.group_norm(picture, 8)) if each.kind == "normalization")
    assert cost.amounts.serial == 8 * 16 * 16
    assert cost.amounts.traffic >= 3 * picture.nbytes  # its input twice, and its output


def test_sectors_are_read_whole(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    pairs = on_card(1024, 2)
    (dense,) = costs(card, lambda: on_card(1024) * 2)
    (every_second,) = costs(card, lambda: pairs[:, 0] * 2)
    assert every_second.amounts.traffic == dense.amounts.traffic + 1024 * 2


def test_calls_of_modules_are_counted_for_the_next_kernel(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    inner = nn.Sequential(nn.Identity(), nn.Sequential(nn.SiLU()))
    tokens = on_card(8)
    before = card.host.now
    (cost,) = costs(card, lambda: inner(tokens))
    assert cost.module_calls == 4
    assert card.host.now - before == pytest.approx(1e9 * card.accelerator.launch_overhead)
    slow = SimulatedCard(1, card.accelerator.model_copy(update={"module_overhead": 1e-3}), card.host)
    slow.run_kernel(cost)
    assert card.host.now - before == pytest.approx(4e6 + 2e9 * card.accelerator.launch_overhead)


def test_modules_that_are_followed_on_meta_cost_the_host_nothing(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    nn.SiLU()(torch.empty(8, device="meta"))
    (cost,) = costs(card, lambda: nn.SiLU()(on_card(8)))
    assert cost.module_calls == 1


def test_calls_of_modules_are_counted_once_cards_are_in_use_and_not_after(make_cards: MakeCards) -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks)
    make_cards()
    assert len(module._global_forward_pre_hooks) <= before + 1
    from tightfit.simulator.backend import use_cards

    use_cards([])
    assert len(module._global_forward_pre_hooks) == 0
