"""Which implementation takes a call of attention, and why.

torch's own kernels go by its rules (aten/src/ATen/native/transformers: sdp_utils_cpp.h, cuda/sdp_utils.cpp and
attention.cpp, torch 2.11 to 2.13). A test holds the rules of cards to what a pretend card does, and those of the CPU
to torch itself. xFormers' are those of its CUTLASS kernel (ops/fmha/cutlass.py), SageAttention's those of `sageattn`
(core.py, version 2).

"auto" changes nothing where torch has a fused kernel, or where all scores together are no more than a block: numbers
are then bit for bit those of the untouched network. Otherwise torch would make the whole matrix of scores (its path
of plain products, "math"), and exact attention that does not is taken instead. SageAttention rounds to eight bits
and is only ever taken by name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Literal, NamedTuple, get_args

from tightfit.errors import PlanError, unknown_name
from tightfit.records import Attention
from tightfit.units import format_bytes

__all__ = ["AttentionCall", "AttentionChoice", "block_bytes", "check_wanted", "choose"]

Mask = Literal["none", "bool", "additive"]

TITLES: Mapping[str, str] = {
    "flash": "torch's flash attention",
    "efficient": "torch's memory-efficient attention",
    "cudnn": "cuDNN's attention",
    "math": "torch's path of plain products",
    "xformers": "xFormers' attention",
    "sage": "SageAttention",
    "chunked": "chunked attention",
}
HALVES = ("float16", "bfloat16")
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # compute capabilities on which torch asks cuDNN before the others
SAGE_CARDS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


class AttentionCall(NamedTuple):
    """What `scaled_dot_product_attention` is called with, without the numbers."""

    device: str  # "cpu", "cuda"; of others nothing is known here
    capability: tuple[int, int] | None  # of a CUDA card, e.g. (8, 9)
    dtype: str  # "float32"
    items: int  # of the batch
    heads: int
    key_heads: int
    value_heads: int
    queries: int
    keys: int
    width: int  # of the heads of queries and keys
    value_width: int
    dimensions: int = 4
    mask: Mask = "none"
    mask_dimensions: int = 0
    mask_learns: bool = False  # whether the mask wants gradients
    mask_in_rows: bool = True  # whether its last dimension lies in a row in memory
    in_rows: bool = True  # whether the last dimensions of queries, keys and values do
    items_match: bool = True  # whether queries, keys and values have as many
    causal: bool = False
    grouped: bool = False  # whether a head of the keys may serve several of the queries
    dropout: float = 0.0

    @property
    def score_bytes(self) -> int:
        """Of the whole matrix of scores; they are float32 where the inputs are halves."""
        return self.items * self.heads * self.queries * self.keys * (8 if self.dtype == "float64" else 4)


class AttentionChoice(NamedTuple):
    name: Attention
    because: str


def check_wanted(name: str) -> Attention:
    """`name`, if it is one that can be wanted; PlanError otherwise."""
    for wanted in get_args(Attention):
        if name == wanted:
            return wanted  # type: ignore[no-any-return]
    raise PlanError(unknown_name("attention", name, get_args(Attention)), name=name)


def block_bytes(device: str) -> int:
    """Bytes of scores that chunked attention makes at once.

    On a CPU, smaller blocks stay in the cache: one thread alone is fastest with 2 to 8 MiB. But threads wait for each
    other in each block, and where something else wants the cores too, only from 32 MiB on is that seldom enough. For
    cards it is an assumption: enough work for all of their multiprocessors.
    """
    return 32 * 2**20 if device == "cpu" else 64 * 2**20


def choose(
    call: AttentionCall, wanted: Attention = "auto", installed: Container[str] = (), block: int | None = None
) -> AttentionChoice:
    """The implementation for `call`, and the reason as a sentence.

    `wanted` is "auto" or a name; a name that cannot take the call gives way to what "auto" chooses. `installed` has
    "xformers" and "sage" where they can be imported. Up to `block` bytes of scores (default: `block_bytes`) may be
    whole.
    """
    if wanted == "torch":
        return AttentionChoice("torch", "torch chooses for itself, as was asked for")
    if wanted == "auto":
        return _choose_freely(call, installed, block or block_bytes(call.device))
    refusal = _refusal(wanted, call, installed)
    if refusal is None:
        return AttentionChoice(wanted, f"{TITLES[wanted]} was asked for")
    name, because = _choose_freely(call, installed, block or block_bytes(call.device))
    return AttentionChoice(name, f"{TITLES[wanted]} does not take {refusal}; {because}")


def _choose_freely(call: AttentionCall, installed: Container[str], block: int) -> AttentionChoice:
    if call.device not in _ORDER:
        return AttentionChoice("torch", f"nothing is known here of the kernels for {call.device}, so torch chooses")
    for kernel in (["cudnn"] if call.capability in CUDNN_FIRST else []) + _ORDER[call.device]:
        if _REFUSALS[kernel](call) is None:
            return AttentionChoice("torch", f"{TITLES[kernel]} takes it, by torch's own choice")
    size, why = format_bytes(call.score_bytes), _REFUSALS[_ORDER[call.device][-1]](call)
    if call.score_bytes <= block:
        return AttentionChoice("torch", f"no fused kernel takes {why}, but all scores are only {size}")
    if call.dropout > 0:
        return AttentionChoice("torch", f"only torch takes {_dropout(call)}")
    name: Attention = "xformers" if _refusal("xformers", call, installed) is None else "chunked"
    return AttentionChoice(name, f"no fused kernel of torch's takes {why}, and all scores would be {size}")


# What each does not take, in words; None where it takes the call.


def _refusal(name: Attention, call: AttentionCall, installed: Container[str]) -> str | None:
    missing = name in ("xformers", "sage") and name not in installed
    return "anything: it is not installed" if missing else _REFUSALS[name](call)


def _refuse_flash(call: AttentionCall) -> str | None:
    if call.device == "cpu":  # torch calls the CPU's only fused kernel so, too
        return (
            _dropout(call)
            or _mask_dimensions(call)
            or ("a mask that wants gradients" if call.mask_learns else None)
            or _unequal_widths(call)
            or _shape(call, grouped=call.grouped)
        )
    return (
        _card(call, (8, 0), HALVES)
        or ("a mask" if call.mask != "none" else None)
        or _unequal_widths(call)
        or (f"heads of {call.width}, more than 256" if call.width > 256 else None)
        or _uneven_causality(call)
        or _shape(call, grouped=call.grouped)
    )


def _refuse_efficient(call: AttentionCall) -> str | None:
    major = (call.capability or (0, 0))[0]
    step = {"float32": 4}.get(call.dtype, 8) if major >= 8 else 8 if call.dtype in HALVES and major == 7 else 1
    return (
        _card(call, (5, 0), ("float32", "float16", *(["bfloat16"] if major >= 8 else [])))
        or _odd_widths(call, step)
        or _shape(call, grouped=False)
    )


def _refuse_cudnn(call: AttentionCall) -> str | None:
    widest = max(call.width, call.value_width)
    return (
        _card(call, (8, 0), HALVES)
        or _mask_dimensions(call)
        or _odd_widths(call, 8)
        or (f"heads of {widest}, more than 128" if widest > 128 else None)
        or ("a single key" if call.keys == 1 else None)
        or _shape(call, grouped=call.grouped)
    )


def _refuse_xformers(call: AttentionCall) -> str | None:
    halves = HALVES if (call.capability or (0, 0)) >= (8, 0) else HALVES[:1]
    return (
        _card(call, (6, 0), ("float32", *halves))
        or _dropout(call)
        or _mask_dimensions(call)
        or ("a mask beside causality" if call.causal and call.mask != "none" else None)
        or _odd_widths(call, 8 if call.dtype in HALVES else 4)
        or _shape(call._replace(mask_in_rows=True), grouped=False)  # it is given a copy of masks that lie otherwise
    )


def _refuse_sage(call: AttentionCall) -> str | None:
    return (
        _card(call, (8, 0), HALVES)
        or (f"compute capability {_version(call)}" if call.capability not in SAGE_CARDS else None)
        or _dropout(call)
        or ("a mask" if call.mask != "none" else None)
        or _unequal_widths(call)
        or (f"heads of {call.width}, more than 128" if call.width > 128 else None)
        or _uneven_causality(call)
        or _shape(call, grouped=call.grouped)
    )


def _card(call: AttentionCall, least: tuple[int, int], dtypes: tuple[str, ...]) -> str | None:
    if call.device != "cuda":
        return f"tensors on the {call.device.upper()}"
    if (call.capability or (0, 0)) < least:
        return f"compute capability {_version(call)}, less than {least[0]}.{least[1]}"
    return call.dtype if call.dtype not in dtypes else None


def _version(call: AttentionCall) -> str:
    return ".".join(map(str, call.capability or ("unknown",)))


def _dropout(call: AttentionCall) -> str | None:
    return f"dropout of {call.dropout}" if call.dropout > 0 else None


def _mask_dimensions(call: AttentionCall) -> str | None:
    known = call.mask == "none" or call.mask_dimensions in (2, 4)
    return None if known else f"a mask of {call.mask_dimensions} dimensions"


def _unequal_widths(call: AttentionCall) -> str | None:
    return f"heads of {call.width} with values of {call.value_width}" if call.width != call.value_width else None


def _odd_widths(call: AttentionCall, step: int) -> str | None:
    odd = [width for width in (call.width, call.value_width) if width == 0 or width % step]
    return f"heads of {odd[0]}, no multiple of {step}" if odd else None


def _uneven_causality(call: AttentionCall) -> str | None:
    uneven = call.causal and call.queries != call.keys
    return f"causality of {call.queries} queries and {call.keys} keys" if uneven else None


def _shape(call: AttentionCall, *, grouped: bool) -> str | None:
    """What no fused kernel takes; where heads are not `grouped`, there must be as many everywhere."""
    others = (call.key_heads, call.value_heads)
    if call.dimensions != 4:
        return f"{call.dimensions} dimensions"
    if not call.items_match:
        return "batches of different sizes"
    if not call.in_rows or (call.device == "cuda" and not call.mask_in_rows):
        return "rows that are spread out in memory"
    if min(call.queries, call.keys) == 0:
        return "empty sequences"
    if grouped and all(call.heads % (other or 1) == 0 for other in others):
        return None
    fits = others == (call.heads, call.heads)
    return (
        None if fits else f"{call.heads} heads of queries for {call.key_heads} of keys and {call.value_heads} of values"
    )


_REFUSALS: Mapping[str, Callable[[AttentionCall], str | None]] = {
    "flash": _refuse_flash,
    "efficient": _refuse_efficient,
    "cudnn": _refuse_cudnn,
    "math": lambda call: None,
    "xformers": _refuse_xformers,
    "sage": _refuse_sage,
    "chunked": _dropout,
}
_ORDER = {"cpu": ["flash"], "cuda": ["flash", "efficient"]}  # torch asks in this order; then it makes the whole matrix
