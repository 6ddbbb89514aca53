"""What torch asks of a device beside its kernels: generators, autocast, streams, and group norm."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map

from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import store_of

__all__ = ["Stream", "giving_to", "group_norm", "offer_generators", "register"]


_torchs = torch.Generator


class _Kind(type):
    """Every generator is an instance of `torch.Generator`, whoever made it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torchs)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _torchs)


class Generator(metaclass=_Kind):
    """What stands in for `torch.Generator`."""

    def __new__(cls, device: Any = None) -> Any:
        place = torch.device("cpu" if device is None else device)
        ours = place.type == torch._C._get_privateuse1_backend_name()
        return _torchs("cpu" if ours else place)


def offer_generators(offered: bool) -> None:
    """Whether `torch.Generator` knows the device from now on."""
    torch.Generator = Generator if offered else _torchs  # type: ignore[misc]


_aten = torch.ops.aten
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_OPERATIONS = (
    _aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default, _aten.conv1d.default, _aten.conv2d.default,
    _aten.conv3d.default, _aten.convolution.default, _aten.einsum.default, _aten.linear.default, _aten.matmul.default,
    _aten.mm.default, _aten.scaled_dot_product_attention.default,
)  # fmt: skip


def register(rest: torch.library.Library, known: torch.library.Library) -> None:
    """Adds the kernels to two libraries, of all namespaces ("_") and of "aten"; they are gone when those are."""
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    for op in _OPERATIONS:
        known.impl(op, functools.partial(_cast, op), "AutocastPrivateUse1")  # type: ignore[no-untyped-call]


def _cast(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if floating else value

    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        args, kwargs = tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)


_PLACE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]


class Stream(torch.Stream):
    """What is given to one stream of `card` is done in order, beside what others are given."""

    card: SimulatedCard

    def __new__(cls, card: SimulatedCard, number: int) -> Stream:
        made: Stream = super().__new__(cls, stream_id=number, device_index=card.index, device_type=_PLACE)
        made.card = card
        return made

    def synchronize(self) -> None:
        """The host waits until it has done what it was given."""
        self.card.timeline.record(self.stream_id).wait()

    def query(self) -> bool:
        """Whether it has by now."""
        return self.card.timeline.record(self.stream_id).done()

    def wait_stream(self, other: Any) -> None:
        """What it is given from now on begins after what `other`, of the same computer, was given so far."""
        self.card.timeline.wait(self.stream_id, other.card.timeline.record(other.stream_id))


@contextlib.contextmanager
def giving_to(stream: Stream | None) -> Iterator[None]:
    """What is done inside goes to `stream`; None is the one that it would go to anyway."""
    with contextlib.nullcontext() if stream is None else stream.card.on(stream.stream_id):
        yield


_COPIES_FIRST = torch.__version__ < "2.14"


def group_norm(
    maps: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`torch.group_norm` on a card, or on one that plays a computer's own CPU."""
    card = store_of(maps).card
    if card.values == "real" or card.accelerator.is_cpu:
        maps = maps.contiguous(memory_format=suggest_memory_format(maps))
    elif _COPIES_FIRST:
        maps = maps.contiguous()
    batch, channels, *spatial = maps.shape
    sizes = (batch, channels, math.prod(spatial), groups, eps)
    normed: torch.Tensor = torch.native_group_norm(maps, weight, bias, *sizes)[0]
    return normed
