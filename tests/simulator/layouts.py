"""Tensors in all kinds of layouts, and operations on two of them: for comparing what lays its results out how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A tensor of `shape`: of storage `stored`, in the order of `order`, each of whose steps is `every` elements."""

    shape: tuple[int, ...]
    kind: str
    order: tuple[int, ...]
    chosen: tuple[bool, ...]

    def on(self, device: str | torch.device) -> torch.Tensor:
        """That tensor, with whatever numbers."""
        count = len(self.shape)
        if self.kind == "permuted":
            back = [self.order.index(place) for place in range(count)]
            return torch.empty([self.shape[place] for place in self.order], device=device).permute(back)
        if self.kind == "expanded":
            few = [1 if one else length for one, length in zip(self.chosen, self.shape, strict=True)]
            return torch.empty(few, device=device).expand(self.shape)
        if self.kind == "sliced":
            wide = [length * (1 + one) for one, length in zip(self.chosen, self.shape, strict=True)]
            return torch.empty(wide, device=device)[tuple(slice(None, None, 1 + one) for one in self.chosen)]
        if self.kind == "odd":  # contiguous, with strides that mean nothing where there is one element
            usual = torch.empty(self.shape, device="meta").stride()
            both = zip(usual, self.shape, self.order, strict=True)
            odd = [(1, step, 7, 1000, 3)[place] if length == 1 else step for step, length, place in both]
            return torch.empty(self.shape, device=device).as_strided(self.shape, odd)
        if self.kind == "channels last" and count > 3:
            last = torch.channels_last if count == 4 else torch.channels_last_3d
            return torch.empty(self.shape, device=device).to(memory_format=last)
        return torch.empty(self.shape, device=device)


@st.composite
def pairs(draw: st.DrawFn, least: int = 2, most: int = 5) -> tuple[Layout, Layout]:
    """Two tensors of one shape of `least` to `most` dimensions, many of which are 1."""
    count = draw(st.integers(least, most))
    shape = tuple(draw(st.lists(st.sampled_from((1, 1, 2, 3, 4, 6)), min_size=count, max_size=count)))
    first, second = (
        Layout(
            shape,
            draw(st.sampled_from(("contiguous", "permuted", "expanded", "sliced", "odd", "channels last"))),
            tuple(draw(st.permutations(range(count)))),
            tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        )
        for _ in range(2)
    )
    return first, second


def differences(
    pair: tuple[Layout, Layout], operations: dict[str, Operation], real: str | torch.device, card: str | torch.device
) -> Iterator[str]:
    """What has other strides on `card` than on `real`."""
    with torch.no_grad():
        for name, operation in operations.items():
            try:
                wanted = operation(*(layout.on(real) for layout in pair))
            except (IndexError, NotImplementedError, RuntimeError, ValueError):  # not for these shapes
                continue
            found = operation(*(layout.on(card) for layout in pair))
            if (found.shape, found.stride()) != (wanted.shape, wanted.stride()):
                given = [(tuple(part.shape), part.stride()) for part in (layout.on("meta") for layout in pair)]
                yield f"{name} of {given}: {found.stride()} instead of {wanted.stride()}"


def positions(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=tensor.device)


def kernel(tensor: torch.Tensor, outputs: int, length: int, groups: int = 1) -> torch.Tensor:
    """Weights for a convolution of `tensor`."""
    sides = (length,) * (tensor.ndim - 2)
    return torch.empty(outputs, tensor.shape[1] // groups, *sides, device=tensor.device)


def convolved(tensor: torch.Tensor, weight: torch.Tensor, **options: int) -> torch.Tensor:
    function: Callable[..., torch.Tensor] = (F.conv1d, F.conv2d, F.conv3d)[tensor.ndim - 3]
    return function(tensor, weight, padding=weight.shape[-1] // 2, **options)


def resized(mode: str) -> Operation:
    return lambda a, b: F.interpolate(a, scale_factor=2.0, mode=mode)


POINTWISE: dict[str, Operation] = {
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "exp": lambda a, b: a.exp(),
    "rsqrt": lambda a, b: a.rsqrt(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "cos": lambda a, b: a.cos(),
    "silu": lambda a, b: F.silu(a),
    "gelu": lambda a, b: F.gelu(a, approximate="tanh"),
    "relu": lambda a, b: F.relu(a),
    "relu6": lambda a, b: F.relu6(a),
    "elu": lambda a, b: F.elu(a),
    "leaky relu": lambda a, b: F.leaky_relu(a),
    "softplus": lambda a, b: F.softplus(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 1.0,
    "add a number there": lambda a, b: a + torch.tensor(1.0, device=a.device),
    "number minus": lambda a, b: 1 - a,
    "mul": lambda a, b: a * b,
    "mul a number": lambda a, b: a * 0.5,
    "divide by a number": lambda a, b: a / 2.0,
    "sum of others, divided": lambda a, b: (a + b) / 1.0,
    "broadcast": lambda a, b: a * b[:, :1],
    "broadcast from the right": lambda a, b: a + b[0],
    "floor": lambda a, b: a // 2,
    "remainder": lambda a, b: a % 2,
    "fmod": lambda a, b: a.fmod(2),
    "power": lambda a, b: a**2,
    "power of a number": lambda a, b: 2**a,
    "power of tensors": lambda a, b: a**b,
    "less": lambda a, b: a < b,
    "more than a number": lambda a, b: a > 0,
    "and": lambda a, b: (a > 0) & (b > 0),
    "not": lambda a, b: ~(a > 0),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where a number": lambda a, b: torch.where(a > 0, a, 0.0),
    "clamp": lambda a, b: a.clamp(-1, 1),
    "clamp by tensors": lambda a, b: a.clamp(b, b),
    "masked fill": lambda a, b: a.masked_fill(b > 0, 0),
    "lerp": lambda a, b: a.lerp(b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "complex": torch.complex,
    "polar": torch.polar,
    "atan2": torch.atan2,
    "isnan": lambda a, b: a.isnan(),
    "nan to num": lambda a, b: a.nan_to_num(),
    "glu": lambda a, b: F.glu(torch.cat([a, a], -1), -1),
    "empty like": lambda a, b: torch.empty_like(a),
    "zeros like": lambda a, b: torch.zeros_like(a),
    "noise like": lambda a, b: torch.randn_like(a),
    "clone": lambda a, b: a.clone(),
    "contiguous": lambda a, b: a.contiguous(),
    "channels last": lambda a, b: a.contiguous(memory_format=torch.channels_last),
    "half": lambda a, b: a.half(),
}
OTHERS: dict[str, Operation] = {
    "softmax": lambda a, b: a.softmax(-1),
    "softmax of channels": lambda a, b: a.softmax(1),
    "log softmax": lambda a, b: a.log_softmax(-1),
    "softmax in float32": lambda a, b: a.half().softmax(-1, dtype=torch.float32),
    "layer norm": lambda a, b: F.layer_norm(a, a.shape[-1:]),
    "norm": lambda a, b: torch.linalg.vector_norm(a, dim=1, keepdim=True),
    "normalize": lambda a, b: F.normalize(a, dim=1),
    "sum": lambda a, b: a.sum(-1),
    "mean of channels": lambda a, b: a.mean(1, keepdim=True),
    "variance": lambda a, b: torch.var_mean(a, 0, correction=0, keepdim=True)[0],
    "most": lambda a, b: a.amax(-1),
    "argmax": lambda a, b: a.argmax(-1),
    "cumsum": lambda a, b: a.cumsum(-1),
    "cat": lambda a, b: torch.cat([a, b], -1),
    "cat of channels": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b]),
    "flip": lambda a, b: a.flip(-1),
    "tril": lambda a, b: a.tril(),
    "repeat": lambda a, b: a.repeat([2] + [1] * (a.ndim - 1)),
    "repeat interleave": lambda a, b: a.repeat_interleave(2, 0),
    "sort": lambda a, b: a.sort(-1)[0],
    "topk": lambda a, b: a.topk(1, -1)[0],
    "index": lambda a, b: a[positions(a)],
    "index channels": lambda a, b: a[:, positions(a)],
    "index two apart": lambda a, b: a[positions(a), :, positions(a)],
    "index select": lambda a, b: a.index_select(0, positions(a)),
    "gather": lambda a, b: a.gather(0, torch.zeros(a.shape, dtype=torch.int64, device=a.device)),
    "pad": lambda a, b: F.pad(a, (1, 1, 0, 1)),
    "nearest": resized("nearest"),
    "nearest-exact": resized("nearest-exact"),
    "bilinear": resized("bilinear"),
    "bicubic": resized("bicubic"),
    "trilinear": resized("trilinear"),
    "average": lambda a, b: F.avg_pool2d(a, 1),
    "adaptive average": lambda a, b: F.adaptive_avg_pool2d(a, 1),
    "linear": lambda a, b: F.linear(a, torch.empty(5, a.shape[-1], device=a.device)),
    "linear with bias": lambda a, b: F.linear(a, a.new_empty(5, a.shape[-1]), a.new_empty(5)),
    "matmul": lambda a, b: a @ b.transpose(-1, -2),
    "einsum": lambda a, b: torch.einsum("abc,dbc->acd", a, b),
    "flattened": lambda a, b: a.flatten(1) + 1,
    "reshaped": lambda a, b: a.reshape(-1),
    "fft": lambda a, b: torch.fft.fft(a),
}
CONVOLUTIONS: dict[str, Operation] = {  # on a CPU by oneDNN, whose rules are others for three dimensions
    "convolution": lambda a, b: convolved(a, kernel(a, 4, 3)),
    "convolution with bias": lambda a, b: F.conv2d(a, kernel(a, 4, 1), a.new_empty(4)),
    "convolution by channel": lambda a, b: convolved(a, kernel(a, a.shape[1], 3, a.shape[1]), groups=a.shape[1]),
    "convolution to one channel": lambda a, b: convolved(a, kernel(a, 1, 3)),
    "channels last weights": lambda a, b: convolved(a, kernel(a, 4, 3).to(memory_format=torch.channels_last)),
    "transposed convolution": lambda a, b: F.conv_transpose2d(a, kernel(a, 4, 2).transpose(0, 1), stride=2),
}
CUDA_ONLY: dict[str, Operation] = {  # other kernels than a CPU's
    "group norm": lambda a, b: F.group_norm(a, 1),
    "instance norm": lambda a, b: F.instance_norm(a),
    "batch norm": lambda a, b: F.batch_norm(a, a.new_zeros(a.shape[1]), a.new_ones(a.shape[1])),
    "batch norm by cuDNN": lambda a, b: F.batch_norm(a, *(a.new_ones(a.shape[1]) for _ in range(4))),
    "rms norm": lambda a, b: F.rms_norm(a, a.shape[-1:]),
    "log sigmoid": lambda a, b: F.logsigmoid(a),
    "dropout": lambda a, b: F.dropout(a, 0.5, training=True),
    "roll": lambda a, b: a.roll(1, -1),
    "pixel shuffle": lambda a, b: F.pixel_shuffle(torch.cat([a] * 4, 1), 2),
    "pixel unshuffle": lambda a, b: F.pixel_unshuffle(torch.cat([a, b], -1), 1),
    "replicate": lambda a, b: F.pad(a, (1, 1) * (a.ndim - 2), mode="replicate"),
    "reflect": lambda a, b: F.pad(a, (1, 1, 1, 1), mode="reflect"),
    "half and float": lambda a, b: a.half() + b,
    "integers and a number": lambda a, b: a.int() + 0.5,
}
