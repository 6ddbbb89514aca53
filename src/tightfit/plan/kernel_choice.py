"""Choice of the attention kernel and of channels-last convolutions, each with its reason."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from tightfit.schema.attention import BACKENDS, AttentionCall, Kernel, kernel_order, unsupported
from tightfit.schema.footprint import Component
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan
from tightfit.units import format_bytes

__all__ = [
    "AttentionChoice",
    "ChosenKernel",
    "LayoutChoice",
    "attention_reasons",
    "choose",
    "choose_layout",
    "score_chunk_bytes",
    "torch_kernel",
]


class ChosenKernel(NamedTuple):
    """The kernel that torch chooses for a call."""

    kernel: Kernel
    refused: str | None  # what the kernel tried just before it does not support; None: it was the first


class AttentionChoice(NamedTuple):
    """An attention backend, and the reason as a sentence."""

    name: str
    because: str


def torch_kernel(call: AttentionCall) -> ChosenKernel:
    """Return the kernel that torch chooses for `call`: the first that supports it, "math" if no fused one does."""
    order = kernel_order(call)
    place = next(place for place, kernel in enumerate(order) if unsupported(kernel, call) is None)  # "math" always does
    return ChosenKernel(order[place], unsupported(order[place - 1], call) if place else None)


def score_chunk_bytes(device: str) -> int:
    """Return the bytes of attention scores that chunked attention computes at a time.

    On a CPU, smaller chunks stay in the cache: one thread alone is fastest with 2 to 8 MiB. But threads wait for each
    other in each chunk, and if other programs use the cores too, that is rare enough only from 32 MiB on. The value
    for cards is an assumption: enough work for all of their multiprocessors.
    """
    return 32 * 2**20 if device == "cpu" else 64 * 2**20


def choose(
    call: AttentionCall, wanted: str = "auto", installed: Container[str] = (), chunk_bytes: int | None = None
) -> AttentionChoice:
    """Return the backend for `call`, and the reason as a sentence.

    `wanted` is "auto" or a name; if the named backend does not support the call, the choice is that of "auto".
    `installed` contains the backends of packages that can be imported. Up to `chunk_bytes` of scores (default:
    `score_chunk_bytes`) may be computed at once.
    """
    if wanted == "torch":
        return AttentionChoice("torch", "torch chooses for itself, as was asked for")
    if wanted == "auto":
        return _choose_freely(call, installed, chunk_bytes or score_chunk_bytes(call.device))
    refused = _unsupported(wanted, call, installed)
    if refused is None:
        return AttentionChoice(wanted, f"{BACKENDS[wanted].title} was asked for")
    name, because = _choose_freely(call, installed, chunk_bytes or score_chunk_bytes(call.device))
    return AttentionChoice(name, f"{BACKENDS[wanted].title} does not take {refused}; {because}")


def _choose_freely(call: AttentionCall, installed: Container[str], chunk_bytes: int) -> AttentionChoice:
    if call.device not in ("cpu", "cuda"):
        return AttentionChoice("torch", f"nothing is known here of the kernels for {call.device}, so torch chooses")
    kernel, refused = torch_kernel(call)
    if kernel != "math":
        return AttentionChoice("torch", f"{BACKENDS[kernel].title} takes it, by torch's own choice")
    size = format_bytes(call.score_bytes)
    if call.score_bytes <= chunk_bytes:
        return AttentionChoice("torch", f"no fused kernel takes {refused}, but all scores are only {size}")
    if (also := unsupported("chunked", call)) is not None:
        return AttentionChoice("torch", f"only torch takes {also}")
    lossless = (name for name, backend in BACKENDS.items() if backend.package and not backend.technique)
    name = next((name for name in lossless if _unsupported(name, call, installed) is None), "chunked")
    return AttentionChoice(name, f"no fused kernel of torch's takes {refused}, and all scores would be {size}")


def _unsupported(name: str, call: AttentionCall, installed: Container[str]) -> str | None:
    missing = BACKENDS[name].package is not None and name not in installed
    return "anything: it is not installed" if missing else unsupported(name, call)


# what is known before a run

_KINDS = {"cuda": "cuda", "simulated": "cuda", "cpu": "cpu", "loopback": "cpu"}  # whose kernels a kind of device has
_MANY = 2**15  # queries and keys, as many as a large image has


def attention_reasons(
    component: Component, chosen: ComponentPlan, accelerator: Accelerator | None
) -> Iterator[tuple[str, str]]:
    """Yield which backend computes the attention of `component`, and why, with {} for its name, as known before a run.

    This covers networks with known head dimensions, and calls without a mask. With "auto", encoders are left out,
    whose prompts are too short for it to matter, and exported or compiled networks, in which the backend is fixed.
    """
    if accelerator is None or accelerator.kind not in _KINDS:
        return
    calls = [_foreseen(width, component, chosen, accelerator) for width in component.head_widths]
    wanted = chosen.attention
    if wanted == "torch":
        yield "attention of {} as torch chooses", "requested, also where that makes all scores at once"
    elif wanted != "auto":
        yield _by_name(wanted, [said for call in calls if (said := unsupported(wanted, call)) is not None])
    elif component.role in ("denoiser", "autoencoder") and not chosen.exported and not component.compiled:
        by_kernel: dict[Kernel, list[AttentionCall]] = {}
        for call in calls:
            by_kernel.setdefault(torch_kernel(call).kernel, []).append(call)
        yield from (_by_itself(kernel, those, accelerator) for kernel, those in by_kernel.items())


def _foreseen(width: int, component: Component, chosen: ComponentPlan, accelerator: Accelerator) -> AttentionCall:
    major, _, minor = (accelerator.compute_capability or "8.0").partition(".")
    device = _KINDS[accelerator.kind]
    return AttentionCall(
        device=device,
        capability=(int(major), int(minor or 0)) if device == "cuda" else None,
        dtype=chosen.compute_dtype or component.main_dtype or "float32",
        items=1, heads=1, key_heads=1, value_heads=1, queries=_MANY, keys=_MANY, width=width, value_width=width,
        flash=accelerator.flash,
    )  # fmt: skip


def _by_name(name: str, refused: list[str]) -> tuple[str, str]:
    said = "requested"
    if BACKENDS[name].package is not None:
        said += ", where it is installed"
    elif BACKENDS[name].whole_scores:
        said += ": all scores are made at once"
    but = f"; what it does not take is done as with auto: {', '.join(dict.fromkeys(refused))}" if refused else ""
    return f"attention of {{}} by {BACKENDS[name].title}", f"{said}{but}"


def _by_itself(kernel: Kernel, calls: list[AttentionCall], accelerator: Accelerator) -> tuple[str, str]:
    """Return what "auto" chooses for `calls` that differ in head dimension only, and why."""
    call, refused = calls[0], torch_kernel(calls[0]).refused
    if kernel == "math":
        scores = format_bytes(score_chunk_bytes(call.device))
        why = f"no fused kernel of torch's takes {refused} on {accelerator.display_name}; {scores} of scores at a time"
        return "attention of {} in chunks", why
    takes = f"it takes heads of {', '.join(str(each.width) for each in calls)} in {call.dtype}"
    if call.device == "cpu":
        return "attention of {} by torch's fused kernel", f"{takes} on {accelerator.display_name}"
    order = kernel_order(call)
    before = f"; {order[order.index(kernel) - 1]} does not take {refused}" if refused else ""
    mask = " without a mask" if kernel == "flash" else ""
    return f"attention of {{}} by {BACKENDS[kernel].title}", f"{takes}{mask} on {accelerator.display_name}{before}"


WORTH = 1.05  # least measured speedup that counts: less is within measurement noise


class LayoutChoice(NamedTuple):
    """Whether convolutions are channels-last, and the reason as a sentence."""

    channels_last: bool
    because: str | None  # None if the plan has channels_last=False


def choose_layout(component: Component, chosen: ComponentPlan, accelerator: Accelerator | None) -> LayoutChoice:
    """Choose the memory format of `component`: as its plan says or, if that is None, the one measured to be faster.

    The measurements are `channels_last_gains` of `accelerator`.
    """
    wanted = chosen.channels_last
    if wanted is False:
        return LayoutChoice(False, None)
    requested, but = ("requested; ", "but ") if wanted else ("", "")
    if not component.convolves:
        return LayoutChoice(bool(wanted), f"{requested}{but}it has no convolutions over pictures")
    dtype = chosen.compute_dtype or component.main_dtype
    gains = accelerator.channels_last_gains if accelerator else {}
    gain = gains.get(f"{component.role}.{dtype}")
    if gain is None:
        where = accelerator.display_name if accelerator else "this device"
        how = f"in {dtype} on {where}" if gains else f"on {where} (`tightfit machine` there would)"
        return LayoutChoice(bool(wanted), f"{requested}whether that is faster was not measured {how}")
    if gain >= WORTH:
        return LayoutChoice(True, f"convolutions ran {gain:.2f} × as fast in it on this computer")
    return LayoutChoice(
        bool(wanted), f"{requested}{but}convolutions ran only {gain:.2f} × as fast in it on this computer"
    )
