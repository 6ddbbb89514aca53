"""Tensors on simulated cards: torch's own operations, storage shared as everywhere, and what shapes cannot do."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from simulator.conftest import ACCELERATOR, MakeCards
from tightfit import RunError
from tightfit.simulator.backend import cards_in_use, use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import free_dead_tensors, store_of
from tightfit.simulator.timeline import Host

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, make_cards: MakeCards) -> None:
    make_cards(2)
    value = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype).transpose(0, 2)
    there = value.to("privateuseone:0")
    assert type(there) is torch.Tensor
    assert (there.device, there.dtype, there.shape, there.stride()) == (
        torch.device("privateuseone:0"), dtype, value.shape, value.stride(),
    )  # fmt: skip
    onward = there.to("privateuseone:1")
    assert onward.device == torch.device("privateuseone:1")
    assert torch.equal(onward.cpu().to(torch.complex64), value.to(torch.complex64))


def test_factories(make_cards: MakeCards) -> None:
    make_cards()
    with torch.device("privateuseone"):
        made = [torch.zeros(3), torch.ones(2, 2), torch.full((2,), 7.0), torch.arange(5), torch.arange(1, 2, 0.25)]
        made += [torch.linspace(0, 1, 5), torch.eye(3), torch.tensor([1.5, 2.5]), torch.empty(0), torch.tensor(3)]
        made += [torch.tril(torch.ones(3, 3)), torch.randn(4), torch.randint(0, 5, (3,)), torch.ones(2).new_zeros(2)]
    assert [str(tensor.device) for tensor in made] == ["privateuseone:0"] * len(made)
    assert torch.equal(made[3].cpu(), torch.arange(5))
    assert torch.equal(made[5].cpu(), torch.linspace(0, 1, 5))
    assert torch.equal(made[7].cpu(), torch.tensor([1.5, 2.5]))


def test_views_share_and_writes_are_seen(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    whole = torch.zeros(4, 4, device="privateuseone")
    before = card.allocator.allocated.now
    row, column, flat = whole[1], whole.t()[2], whole.view(-1)
    row += 1
    column.fill_(5)
    flat[0] = 9
    whole[3, :2] = torch.tensor([7.0, 8.0])
    assert whole.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    assert torch.equal(whole[0].cpu(), torch.tensor([9.0, 0.0, 5.0, 0.0]))
    assert torch.equal(whole[1].cpu(), torch.tensor([1.0, 1.0, 5.0, 1.0]))
    assert torch.equal(whole[3].cpu(), torch.tensor([7.0, 8.0, 5.0, 0.0]))
    free_dead_tensors()
    assert card.allocator.allocated.now == before


def test_memory_goes_with_the_last_view(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    whole = torch.zeros(2**20, device="privateuseone")
    half = whole[: 2**19]
    del whole
    free_dead_tensors()
    assert card.allocator.allocated.now == 4 * 2**20
    del half
    free_dead_tensors()
    assert card.allocator.allocated.now == 0


def test_modules_move_load_and_swap(make_cards: MakeCards, tmp_path: Path) -> None:
    make_cards(2)
    torch.manual_seed(0)
    store = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    value = torch.randn(3, 4)
    save_file(store.state_dict(), tmp_path / "weights.safetensors")
    there = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to("privateuseone:1")
    there.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert all(isinstance(parameter, nn.Parameter) for parameter in there.parameters())
    assert torch.equal(there(value.to("privateuseone:1")).cpu(), store(value))
    there[0].weight.data = torch.zeros(8, 4, device="privateuseone:1")
    there[0].bias.data.zero_()
    assert torch.equal(there[0](value.to("privateuseone:1")).cpu(), torch.zeros(3, 8))
    assert torch.equal(there.cpu()[2].weight, store[2].weight)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_norms_and_interpolation(spatial: int, make_cards: MakeCards) -> None:
    make_cards()
    torch.manual_seed(0)
    kinds = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
    value = torch.randn(2, 4, *[6] * spatial)
    for kind in kinds[spatial]:
        module = nn.Sequential(kind(4, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        wanted = F.interpolate(module(value), scale_factor=2.0, mode="nearest")
        there = F.interpolate(module.to("privateuseone")(value.to("privateuseone")), scale_factor=2.0, mode="nearest")
        assert torch.equal(there.cpu(), wanted)


def test_an_item_needs_a_number(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    assert torch.tensor([1.0, 2.0], device="privateuseone").sum().item() == 3.0
    large = torch.ones(2**20, device="privateuseone")
    assert store_of(large).values is None
    assert store_of(torch.arange(2**16, device="privateuseone")).values is not None  # positions and masks decide
    with pytest.raises(RunError, match=r"item\(\) needs the numbers of a tensor of shape \(\)"):
        large.sum().item()
    with pytest.raises(RunError, match=r"a copy to the host needs the numbers of a tensor of shape \(1048576,\)"):
        large.cpu()


def test_an_error_that_was_handled_keeps_no_memory(make_cards: MakeCards) -> None:
    """Chunks of feed-forwards compare first results, which have no values here."""
    (card,) = make_cards(values="shapes")

    def compare() -> None:
        used = torch.empty(2**20, device="privateuseone")
        with contextlib.suppress(RunError):
            used.sum().item()

    gc.disable()
    try:
        compare()
        free_dead_tensors()
        assert card.allocator.allocated.now == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("values", ["shapes", "real"])
def test_equal_needs_numbers(make_cards: MakeCards, values: Any) -> None:
    make_cards(values=values)
    one = torch.arange(10, device="privateuseone")
    assert torch.equal(one, one.clone())
    assert not torch.equal(one, one + 1)
    assert not torch.equal(one, one[:5])
    large = torch.randn(2**20, device="privateuseone")
    if values == "shapes":
        with pytest.raises(RunError, match=r"item\(\) needs the numbers"):
            torch.equal(large, large.clone())
    else:
        assert torch.equal(large, large.clone())


def test_masks_select_as_many_as_they_say(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    large = torch.empty(4, 64, 1024, device="privateuseone")
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[:, :10] = True
    assert large[mask.to("privateuseone")].shape == (40, 1024)


def test_two_cards_do_not_mix(make_cards: MakeCards) -> None:
    make_cards(2)
    with pytest.raises(RuntimeError, match="found at least two devices, privateuseone:0 and privateuseone:1"):
        torch.ones(2, device="privateuseone:0") + torch.ones(2, device="privateuseone:1")
    assert (torch.ones(2, device="privateuseone:1") + torch.tensor(2.0)).device == torch.device("privateuseone:1")


def test_what_shapes_cannot_do_names_itself(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    with pytest.raises(NotImplementedError, match=r"the simulated device cannot do aten\.nonzero\.default on shapes"):
        torch.ones(2**20, device="privateuseone").nonzero()


def test_only_cards_in_use_exist(make_cards: MakeCards) -> None:
    make_cards(2)
    assert [card.index for card in cards_in_use()] == [0, 1]
    with pytest.raises(RunError, match="there is no privateuseone:2: 2 simulated cards are in use"):
        torch.ones(1, device="privateuseone:2")
    kept = torch.ones(3, device="privateuseone:1")
    use_cards(cards_in_use()[:1])
    assert torch.equal((kept + kept).cpu(), torch.full((3,), 2.0))


def test_a_convolution_holds_what_it_was_measured_to_hold(make_cards: MakeCards) -> None:
    """https://github.com/pytorch/pytorch/issues/95024: 12,874,233,344 bytes allocated at most, on an A100."""
    (card,) = make_cards(values="shapes")
    picture = torch.empty(1, 64, 361, 370, 251, dtype=torch.float16, device="privateuseone")
    layer = nn.Conv3d(64, 32, kernel_size=3, padding=1, dtype=torch.float16, device="privateuseone")
    layer(picture)
    assert abs(card.allocator.allocated.peak - 12_874_233_344) <= 1024


@pytest.mark.parametrize(
    ("capability", "dtype", "groups", "copies"),
    [("8.9", torch.bfloat16, 1, True), ("8.0", torch.float32, 1, True), ("7.5", torch.float16, 1, True),
     ("7.5", torch.float32, 1, False), ("6.1", torch.float16, 1, False), ("8.9", torch.bfloat16, 64, False)],
)  # fmt: skip
def test_convolutions_on_tensor_cores_hold_copies(
    capability: str, dtype: torch.dtype, groups: int, copies: bool, make_cards: MakeCards
) -> None:
    make_cards(values="shapes")
    like = ACCELERATOR.model_copy(update={"compute_capability": capability})
    card = SimulatedCard(0, like, Host())
    use_cards([card])
    picture = torch.empty(1, 64, 128, 128, dtype=dtype, device="privateuseone")
    kernel = torch.empty(64, 64 // groups, 3, 3, dtype=dtype, device="privateuseone")
    before = card.allocator.allocated.now
    card.allocator.allocated.reset_peak()
    F.conv2d(picture, kernel, padding=1, groups=groups)
    held = 2 * picture.nbytes + kernel.nbytes if copies else 0
    assert card.allocator.allocated.peak - before == picture.nbytes + held
    last, weight = (part.contiguous(memory_format=torch.channels_last) for part in (picture, kernel))
    free_dead_tensors()
    before = card.allocator.allocated.now
    card.allocator.allocated.reset_peak()
    F.conv2d(last, weight, padding=1, groups=groups)
    assert card.allocator.allocated.peak - before == picture.nbytes


def test_group_norm_wants_channels_first_before_torch_2_15(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    for side in (4, 64) if torch.__version__ < "2.14" else (64,):  # small maps keep their numbers, as the CPU lays them
        maps = torch.randn(1, 8, side, side).to("privateuseone").contiguous(memory_format=torch.channels_last)
        assert F.group_norm(maps, 2).is_contiguous() is (torch.__version__ < "2.15")


def test_arithmetic_takes_its_time(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    left, right = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="privateuseone") for _ in range(2))
    card.timeline.synchronize()
    before = card.now
    left @ right
    operations = 2 * 8192**3
    assert card.now - before == pytest.approx(operations / 100e12 * 1e9 + 5_000, rel=1e-3)


def test_shapes_are_those_of_the_same_operation_with_the_same_numbers(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    large = torch.empty(64, 1024, device="privateuseone")
    for _ in range(2):  # the second time they are remembered
        assert (large + 1).dtype == torch.float32
        assert (large + True).dtype == torch.float32
        assert torch.sum(large, 0).shape == (1024,)
        assert torch.sum(large, 1).shape == (64,)
        assert torch.sum(large, 1, keepdim=True).shape == (64, 1)
        assert [value.shape for value in torch.max(large, 0)] == [(1024,), (1024,)]
        assert (large.to(torch.int64) // 1).dtype == torch.int64
        assert (large.to(torch.int64) / 1).dtype == torch.float32


def test_autocast_computes_in_its_dtype(make_cards: MakeCards) -> None:
    make_cards()
    left, right = torch.randn(4, 8), torch.randn(8, 3, dtype=torch.float64).to(torch.bfloat16)
    with torch.autocast("privateuseone", torch.bfloat16):
        product = left.to("privateuseone") @ right.to("privateuseone")
        total = left.to("privateuseone") + 1
        attended = F.scaled_dot_product_attention(*(left.to("privateuseone")[None, None] for _ in range(3)))
    assert (product.dtype, total.dtype, attended.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert torch.equal(product.cpu(), left.to(torch.bfloat16) @ right)
    with torch.autocast("privateuseone", torch.float32):
        wide = torch.einsum("ab,bc->ac", left.to("privateuseone"), right.to("privateuseone"))
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.cpu(), left @ right.float())  # sums in another order
