"""Device features that torch needs beside kernels: generators, autocast, streams, group norm, and module calls."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.storage import store_of
from tightfit.simulator.timeline import Host

__all__ = ["Stream", "count_module_calls", "giving_to", "group_norm", "offer_generators", "register"]


_torchs = torch.Generator


class _Kind(type):
    """Makes every generator an instance of `torch.Generator`, whichever class created it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torchs)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _torchs)


class Generator(metaclass=_Kind):
    """Replacement for `torch.Generator` that also accepts the simulated device, with a CPU generator."""

    def __new__(cls, device: Any = None) -> Any:
        place = torch.device("cpu" if device is None else device)
        ours = place.type == torch._C._get_privateuse1_backend_name()
        return _torchs("cpu" if ours else place)


def offer_generators(offered: bool) -> None:
    """Make `torch.Generator` accept the simulated device from now on, or restore torch's own class."""
    torch.Generator = Generator if offered else _torchs  # type: ignore[misc]


_counting: list[RemovableHandle] = []  # of the one hook


def count_module_calls(hosts: Iterable[Host]) -> None:
    """From now on count calls of modules for `hosts`, and for no others; not those that are followed on "meta"."""
    while _counting:
        _counting.pop().remove()
    each = tuple({id(host): host for host in hosts}.values())

    def count(_: Any, given: tuple[Any, ...]) -> None:
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in given):
            return
        for host in each:
            host.module_calls += 1

    if each:
        _counting.append(register_module_forward_pre_hook(count))


_aten = torch.ops.aten
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_OPERATIONS = (
    _aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default, _aten.conv1d.default, _aten.conv2d.default,
    _aten.conv3d.default, _aten.convolution.default, _aten.einsum.default, _aten.linear.default, _aten.matmul.default,
    _aten.mm.default, _aten.scaled_dot_product_attention.default,
)  # fmt: skip


def register(rest: torch.library.Library, known: torch.library.Library) -> None:
    """Register the autocast kernels in libraries of all namespaces ("_") and of "aten", for the libraries' lifetime."""
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
    """A stream of `card`: its work runs in order, concurrently with other streams."""

    card: SimulatedCard

    def __new__(cls, card: SimulatedCard, number: int) -> Stream:
        made: Stream = super().__new__(cls, stream_id=number, device_index=card.index, device_type=_PLACE)
        made.card = card
        return made

    def synchronize(self) -> None:
        """Block the host until the stream has done all submitted work."""
        self.card.timeline.record(self.stream_id).wait()

    def query(self) -> bool:
        """Whether the stream has done all submitted work."""
        return self.card.timeline.record(self.stream_id).done()

    def wait_stream(self, other: Any) -> None:
        """Make work submitted from now on begin after all work submitted to `other` so far; both have the same host."""
        self.card.timeline.wait(self.stream_id, other.card.timeline.record(other.stream_id))


@contextlib.contextmanager
def giving_to(stream: Stream | None) -> Iterator[None]:
    """Make `stream` the current stream inside the context; None keeps the current one."""
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
    """`torch.group_norm` on a simulated card or a simulated CPU; the result has the shape of `maps`."""
    card = store_of(maps).card
    if card.values == "real" or card.accelerator.is_cpu:
        maps = maps.contiguous(memory_format=suggest_memory_format(maps))
    elif _COPIES_FIRST:
        maps = maps.contiguous()
    batch, channels, *spatial = maps.shape
    sizes = (batch, channels, math.prod(spatial), groups, eps)
    normed: torch.Tensor = torch.native_group_norm(maps, weight, bias, *sizes)[0]
    return normed
