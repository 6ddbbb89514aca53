"""Which bytes of memory an operation reads and writes; the stub's race detector is told of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["fills_its_bytes", "on_cpu", "report_accesses"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_RUNS = 512  # a tensor in more pieces than these is not reported

_library = ctypes.CDLL(None)


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


def report_accesses(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Tells the stub which bytes an operation reads and writes, on the current stream of the card it is done on."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    arguments = function._schema.arguments
    named = {argument.name: argument for argument in arguments}
    given = list(zip(arguments, args, strict=False)) + [(named[k], v) for k, v in kwargs.items() if k in named]
    for argument, value in given:
        into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
        tree_map_only(torch.Tensor, into.append, value)
    known = {tensor.data_ptr() for tensor in reads + writes if type(tensor) in PLAIN}
    made: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, made.append, out)
    writes += [tensor for tensor in made if type(tensor) is torch.Tensor and tensor.data_ptr() not in known]
    card = next((tensor.device for tensor in writes + reads if tensor.device.type == "cuda"), None)
    name = function._schema.name.encode()
    with torch.cuda.device(card):  # a default stream is told by which card is current
        stream = torch.cuda.current_stream(card).cuda_stream
        for tensors, write in ((reads, 0), (writes, 1)):
            for tensor in tensors:
                if type(tensor) in PLAIN and tensor.device.type in ("cuda", "cpu") and tensor.layout is torch.strided:
                    where = ctypes.c_void_p(stream if tensor.device.type == "cuda" else -1)
                    for address, size in _runs(tensor):
                        _library.stub_touch(where, ctypes.c_void_p(address), ctypes.c_size_t(size), write, name)
