"""Operations on simulated cards: the CPU's numbers, the right shapes without numbers, and errors that name them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from simulator.conftest import MakeCards
from tightfit import RunError
from tightfit.simulator import operations, storage

Operation = Callable[[torch.Tensor], Any]


def on(tensor: torch.Tensor, *values: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, device=tensor.device, dtype=dtype)


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.add_(1).mul_(2).clamp_(-1, 1)
    tensor[:, 0] = 3
    tensor[..., -1] += tensor[..., 0]
    tensor[tensor > 0.5] = 0.5
    tensor.transpose(1, 2)[0] %= 0.3
    return tensor


def rotated(tensor: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, by complex numbers."""
    turns = torch.polar(torch.ones(6, 3, device=tensor.device), torch.arange(18.0, device=tensor.device).view(6, 3))
    pairs = torch.view_as_complex(tensor.reshape(*tensor.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3)


def without_low_frequencies(tensor: torch.Tensor) -> torch.Tensor:
    """As FreeU does it."""
    spectrum = torch.fft.fftshift(torch.fft.fftn(tensor, dim=(-2, -1)), dim=(-2, -1))
    spectrum[..., 2:4, 2:4] *= 0.5
    return torch.fft.ifftn(torch.fft.ifftshift(spectrum, dim=(-2, -1)), dim=(-2, -1)).real


def solved(tensor: torch.Tensor) -> torch.Tensor:
    """As UniPC does it."""
    matrix = tensor[0, :, :4, :4] + 5 * torch.eye(4, device=tensor.device)
    return torch.linalg.solve(matrix, tensor[0, :, :4, 0])


def resized(mode: str, **settings: Any) -> Operation:
    return lambda x: F.interpolate(x, size=(9, 4), mode=mode, **settings)


OPERATIONS: dict[str, Operation] = {  # of a tensor of shape (2, 4, 6, 6)
    "in place": in_place,
    "masks": lambda x: (x.masked_fill(x > 0, -1), torch.where(x > 0, x, 0.0), (x > 0) & (x < 1) | (x == 0)),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.arange(288.0, device=x.device)),
    "host indices": lambda x: (x[:, torch.tensor([2, 0])], x[torch.tensor([True, False])]),
    "indices": lambda x: (x[:, [1, 0]], x.gather(1, x.argsort(1)), torch.take_along_dim(x, x.argsort(1), 1)),
    "index_put": lambda x: torch.index_put(x, (on(x, 0, 1, dtype=torch.int64),), x[:1]),
    "index_add": lambda x: x.index_add(1, on(x, 2, 0, dtype=torch.int64), x[:, :2]),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x),
    "embedding": lambda x: F.embedding(on(x, 0, 2, dtype=torch.int64), x[0, 0]),
    "one_hot": lambda x: F.one_hot(on(x, 0, 2, dtype=torch.int64), 4),
    "sort": lambda x: (*x.sort(), *x.topk(2), x.argmax(1), x.flatten().kthvalue(3)[0], x.median()),
    "cumsum": lambda x: (x.cumsum(1), x.cumprod(1), x.diff(dim=1), x.logsumexp(1)),
    "quantile": lambda x: torch.quantile(x.flatten(1).abs(), 0.9, dim=1),
    "statistics": lambda x: (x.std(1), x.var((1, 2)), *torch.var_mean(x, 1), x.amax((1, 2)), *torch.aminmax(x)),
    "remainders": lambda x: (x % 0.3, x // 0.3, x.fmod(0.3), 5 % (x.abs() + 1), (x * 9).long() & 3, 2**x),
    "powers": lambda x: (x.abs() ** 0.3, x.abs().rsqrt(), x.erf(), x.sigmoid().logit(), torch.atan2(x, x + 1)),
    "mixtures": lambda x: (x.lerp(x + 1, 0.3), x.addcmul(x, x, value=2), x.clamp(x - 1, x * 0), x.nan_to_num()),
    "search": lambda x: (torch.bucketize(x, on(x, 0, 1)), torch.searchsorted(on(x, 0, 1), x)),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "products": lambda x: (x @ x[0, 0], torch.cdist(x[0], x[0]), torch.baddbmm(x[0], x[0], x[1])),
    "layouts": lambda x: (x.flip(1), x.roll((1, 1), (2, 3)), x.repeat_interleave(2, 1), x.tile(2, 1, 1, 1), x.tril()),
    "parts": lambda x: (x.chunk(2, 1)[1], x.split([1, 3], 1)[1], x.unbind(1)[0], torch.cat([x, x], 1)),
    "views": lambda x: (x.unfold(2, 3, 1), x.view(torch.int32), x.movedim(1, -1).contiguous(), x[:1].expand_as(x)),
    "channels last": lambda x: x.to(memory_format=torch.channels_last) + 1,
    "nearest": resized("nearest"),
    "nearest-exact": resized("nearest-exact"),
    "bilinear": resized("bilinear"),
    "bicubic": resized("bicubic", align_corners=True),
    "area": resized("area"),
    "antialiased": resized("bilinear", antialias=True),
    "linear": lambda x: F.interpolate(x[:, :, 0], size=9, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None], size=(2, 3, 9), mode="trilinear"),
    "conv1d": lambda x: F.conv1d(x[:, :, 0], x[:, :, :3, 0], padding=1),
    "conv2d": lambda x: F.conv2d(x, x[:, :, :3, :3], stride=2, dilation=2, padding=1),
    "conv2d by channel": lambda x: F.conv2d(x, x[0, :, None, :3, :3], groups=4),
    "conv3d": lambda x: F.conv3d(x[None], x[:, :, None, :3, :3].transpose(0, 1), padding=1),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[0], x[0, 0, :, None, :3].expand(6, 2, 3), stride=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, x[0, :, None, :3, :3], stride=2, output_padding=1),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x[None], x[:, :, None, :3, :3], stride=2),
    "norms": lambda x: (F.group_norm(x, 2), F.layer_norm(x, (6,)), F.rms_norm(x, (6,), x[0, 0, 0].contiguous())),
    "more norms": lambda x: (F.instance_norm(x), F.normalize(x), F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 1].abs())),
    "pixel_shuffle": lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)),
    "unfold and fold": lambda x: F.fold(F.unfold(x, 2, stride=2), (6, 6), 2, stride=2),
    "padding": lambda x: [F.pad(x, (1, 2, 1, 1), mode=mode) for mode in ("constant", "reflect", "replicate")],
    "circular padding": lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"),
    "pooling": lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1)),
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2, :, :2].tanh(), align_corners=False),
    "activations": lambda x: (F.gelu(x, approximate="tanh"), F.silu(x), F.glu(x, 1), F.softplus(x), F.mish(x)),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(1)),
    "rotary embedding": rotated,
    "fft": without_low_frequencies,
    "rfft": lambda x: (torch.fft.irfft(torch.fft.rfft(x)), torch.fft.rfft2(x).abs()),
    "complex": lambda x: (torch.complex(x, x).conj() * 1j, torch.complex(x, x).conj().imag + 1, torch.exp(1j * x)),
    "solve": solved,
    "linalg": lambda x: (torch.linalg.inv(x[0, :, :4, :4]), torch.linalg.vector_norm(x, dim=1), torch.linalg.det(x)),
    "dtypes": lambda x: (x.half() * 2, x.bfloat16() @ x.bfloat16().transpose(-1, -2), x.sum(dtype=torch.float64)),
    "foreach": lambda x: torch._foreach_add([x, x], 1),
}  # fmt: skip


def tensors(value: Any) -> Iterator[torch.Tensor]:
    return iter((value,)) if isinstance(value, torch.Tensor) else iter(value)


@pytest.fixture
def value() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4, 6, 6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_those_of_the_cpu(name: str, value: torch.Tensor, make_cards: MakeCards) -> None:
    make_cards()
    wanted = list(tensors(OPERATIONS[name](value)))
    results = list(tensors(OPERATIONS[name](value.to("privateuseone"))))
    assert [result.device.type for result in results] == ["privateuseone"] * len(wanted)
    for result, numbers in zip(results, wanted, strict=True):
        torch.testing.assert_close(result.cpu(), numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_right_without_numbers(
    name: str, value: torch.Tensor, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SMALL", 0)
    make_cards(values="shapes")
    wanted = list(tensors(OPERATIONS[name](value)))
    for _ in range(2):  # the second time some are remembered
        results = list(tensors(OPERATIONS[name](value.to("privateuseone"))))
        assert [(result.shape, result.dtype) for result in results] == [(other.shape, other.dtype) for other in wanted]


NEEDS_NUMBERS: dict[str, tuple[Operation, str]] = {
    "nonzero": (lambda x: (x > 0).nonzero(), r"cannot do aten\.nonzero\.default on shapes alone.*values='real'"),
    "masked_select": (lambda x: x.masked_select(x > 0), r"cannot do aten\.masked_select\.default on shapes alone"),
    "a mask as index": (lambda x: x[x > 0], r"indexing with a mask needs the numbers.*on the CPU"),
    "bool": (lambda x: bool((x > 0).all()), r"item\(\) needs the numbers of a tensor of shape \(\).*values='real'"),
    "tolist": (lambda x: x.tolist(), r"a copy to the host needs the numbers of a tensor of shape \(1048576,\)"),
    "equal": (lambda x: torch.equal(x, x), r"item\(\) needs the numbers of a tensor"),
    "cummax": (lambda x: x.cummax(0), r"cannot do aten\._cummax_helper\.default on shapes alone"),
}


@pytest.mark.parametrize("name", NEEDS_NUMBERS)
def test_what_needs_numbers_says_so(name: str, make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    operation, message = NEEDS_NUMBERS[name]
    large = torch.ones(2**20, device="privateuseone") * torch.ones(2**20, device="privateuseone")
    if name == "a mask as index":  # of more truth values than are kept
        large = torch.ones(2**24, device="privateuseone")
    with pytest.raises((RunError, NotImplementedError), match=message):
        operation(large)


def test_what_only_cuda_has_says_so(make_cards: MakeCards) -> None:
    make_cards()
    with pytest.raises(
        NotImplementedError, match=r"cannot do aten\._thnn_fused_lstm_cell\.default on numbers.*the CPU$"
    ):
        nn.LSTM(2, 3).to("privateuseone")(torch.ones(1, 1, 2, device="privateuseone"))


def test_numbers_for_python(make_cards: MakeCards) -> None:
    make_cards()
    value = torch.arange(3, device="privateuseone")
    assert (value.tolist(), int(value[2]), bool(value[0]), f"{value[1] / 2:.2f}") == ([0, 1, 2], 2, False, "0.50")
    assert [int(number) for number in value] == [0, 1, 2]
    assert torch.equal(value, value.clone())
    assert torch.allclose(value / 3, value / 3)


def test_deep_copies_share_what_was_shared(make_cards: MakeCards) -> None:
    make_cards(2)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("privateuseone:1")
    module[0].weight.data = torch.ones(2, 2, device="privateuseone:1")
    copied = copy.deepcopy(module)
    module[0].weight.data.zero_()
    assert torch.equal(copied[0].weight.cpu(), torch.ones(2, 2))
    assert copied[1].running_var.device == torch.device("privateuseone:1")
    assert copied[1].running_var.data_ptr() != module[1].running_var.data_ptr()
    whole = torch.arange(4, device="privateuseone:0")
    first, second = copy.deepcopy([whole, whole[1:]])
    first += 1
    assert second.tolist() == [2, 3, 4]
    assert whole.tolist() == [0, 1, 2, 3]
    on_host = copy.deepcopy([torch.arange(3)])[0]
    assert on_host.tolist() == [0, 1, 2]


@pytest.mark.parametrize("assign", [False, True])
def test_state_is_loaded_and_parameters_stay_parameters(assign: bool, make_cards: MakeCards) -> None:
    make_cards(2)
    store, there = nn.Linear(3, 2), nn.Linear(3, 2).to("privateuseone:1")
    before = there.weight
    state = {name: tensor.to("privateuseone:0") for name, tensor in store.state_dict().items()}
    there.load_state_dict(state, assign=assign)
    assert isinstance(there.weight, nn.Parameter)
    assert (there.weight is before) is not assign
    assert there.weight.device == torch.device("privateuseone:0" if assign else "privateuseone:1")
    assert torch.equal(there.weight.cpu(), store.weight)


def test_what_shapes_gave_is_not_worked_out_again(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, a card is told the same work, and only that; memory is taken and given back as ever."""
    (card,) = make_cards(values="shapes")
    asked: list[object] = []
    usual = operations.kernel_cost_of
    monkeypatch.setattr(operations, "kernel_cost_of", lambda op, *rest: asked.append(op) or usual(op, *rest))
    works: list[object] = []
    card.kernel_callbacks.append(works.append)
    one, other = (torch.empty(613, 1021, device="privateuseone:0") for _ in range(2))
    works.clear()
    asked.clear()
    first, second = one + other, one + other
    assert len(asked) == 1
    assert works[0] == works[1]
    assert first.shape == second.shape
    assert first.data_ptr() != second.data_ptr()
    twice = one + one  # read once
    assert len(asked) == 2
    assert works[2] != works[0]
    before = card.allocator.allocated.now
    del first, second, twice
    operations.free_dead_tensors()
    assert card.allocator.allocated.now < before


@pytest.mark.parametrize(("channels", "computed"), [(4, True), (400, False)])
def test_what_is_too_large_to_keep_its_numbers_is_not_computed(
    channels: int, computed: bool, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first convolution of a U-Net in float16, on latents of a small picture, takes a CPU a third of a second."""
    make_cards(values="shapes")
    usual, on_numbers = operations._run, list[object]()

    def run(op: Any, args: Any, kwargs: Any, *, shapes: bool) -> Any:
        on_numbers.extend([] if shapes else [op])
        return usual(op, args, kwargs, shapes=shapes)

    picture, weight = torch.ones(1, 4, 32, 32), torch.ones(channels, 4, 1, 1)
    there = [each.to("privateuseone:0") for each in (picture, weight)]
    monkeypatch.setattr(operations, "_run", run)
    made = F.conv2d(*there)
    assert made.shape == (1, channels, 32, 32)
    assert (torch.ops.aten.convolution.default in on_numbers) is computed
    if computed:
        assert torch.equal(made.cpu(), F.conv2d(picture, weight))


def test_of_a_large_tensor_it_is_known_what_filled_it(make_cards: MakeCards) -> None:
    """HunyuanVideo 1.5's networks ask whether `torch.all(image_embeds == 0)`, of 1.7 MB."""
    make_cards(values="shapes")
    zeros = torch.zeros(1, 729, 1152, device="privateuseone:0", dtype=torch.bfloat16)
    assert torch.all(zeros == 0)
    assert torch.all(zeros.to(torch.float32).repeat(2, 1, 1) == 0)
    assert not torch.any(torch.full_like(zeros, 3) <= 2)
    assert not torch.all(torch.empty_like(zeros).copy_(zeros) != 0)
    half = zeros.clone()
    half[:, :, :576] = 1
    for unknown in (half, zeros + 1, torch.rand_like(zeros), zeros.clone().add_(1)):
        with pytest.raises(RunError, match="needs the numbers"):
            bool(torch.all(unknown == 0))
    ones = torch.ones(729, 1152).to("privateuseone:0")
    zeros.copy_(ones[None])
    with pytest.raises(RunError, match="needs the numbers"):
        bool(torch.all(zeros == 0))
