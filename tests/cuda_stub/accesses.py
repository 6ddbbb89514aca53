"""Which bytes of memory an operation reads and writes; the stub's race detector is told of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["changed_within", "current_stream", "fills_its_bytes", "on_card", "on_cpu", "report_accesses", "tensors_in"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_RUNS = 512  # a tensor in more pieces than these is not reported

_library = ctypes.CDLL(None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those in lists, tuples and dictionaries; pytree's own takes most of the time of a test of small networks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def changed_within(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with other tensors in its lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([changed_within(change, each) for each in value])
    if isinstance(value, dict):
        return {key: changed_within(change, each) for key, each in value.items()}
    return value


def current_stream(card: torch.device | None = None) -> ctypes.c_void_p:
    """The current stream of `card` (or of the current one), as the stub's functions know it."""
    return ctypes.c_void_p(torch.cuda.current_stream(card).cuda_stream)


@contextlib.contextmanager
def on_card(card: torch.device | None) -> Iterator[None]:
    """With `card` as the current one: a default stream is told by which card is current."""
    if card is None or card.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(card):
            yield


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU's view of the bytes of a CUDA tensor: the stub's card has host memory."""
    if tensor.device.type != "cuda":
        return tensor
    size = tensor.untyped_storage().nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(tensor.untyped_storage().data_ptr())
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return view.conj() if tensor.is_conj() else view


def fills_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether it has as many elements as lie between its first and its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() in {0, last + 1}


def _runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Address and bytes of each stretch of memory that it lies in; none where these are very many."""
    if not tensor.numel():
        return []
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.nbytes)]
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s)
    length, outer = 1, []
    for stride, n in dims:
        if stride == length and not outer:
            length *= n
        else:
            outer.append((stride, n))
    starts = [0]
    for stride, n in outer:
        if len(starts) * n > MOST_RUNS:
            return []
        starts = [start + stride * i for start in starts for i in range(n)]
    return [(tensor.data_ptr() + start * tensor.itemsize, length * tensor.itemsize) for start in starts]


@functools.cache
def _written(function: Any) -> tuple[dict[str, bool], bytes]:
    """Of each argument of an operation, by its name: whether it is written; and the operation's name."""
    arguments = function._schema.arguments
    written = {each.name: each.alias_info is not None and each.alias_info.is_write for each in arguments}
    return written, function._schema.name.encode()


def report_accesses(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Tells the stub which bytes an operation reads and writes, on the current stream of the card it is done on."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    written, operation = _written(function)
    named = [(written[name], value) for name, value in kwargs.items() if name in written]
    for is_written, value in [*zip(written.values(), args, strict=False), *named]:
        (writes if is_written else reads).extend(tensors_in(value))
    known = {tensor.data_ptr() for tensor in reads + writes if type(tensor) in PLAIN}
    writes += [tensor for tensor in tensors_in(out) if type(tensor) is torch.Tensor and tensor.data_ptr() not in known]
    card = next((tensor.device for tensor in writes + reads if tensor.device.type == "cuda"), None)
    with on_card(card):
        stream, host = current_stream(card), ctypes.c_void_p(-1)
        for tensors, write in ((reads, 0), (writes, 1)):
            for tensor in tensors:
                if type(tensor) in PLAIN and tensor.device.type in ("cuda", "cpu") and tensor.layout is torch.strided:
                    where = stream if tensor.device.type == "cuda" else host
                    for address, size in _runs(tensor):
                        _library.stub_touch(where, ctypes.c_void_p(address), ctypes.c_size_t(size), write, operation)
