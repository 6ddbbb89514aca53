"""A Machine → text. Its JSON is that of the record."""

from __future__ import annotations

from tightfit.report.summary import align
from tightfit.schema.machine import Accelerator, Machine
from tightfit.units import format_bytes

__all__ = ["describe_machine"]

_KINDS = ("matmul", "convolution", "attention")
_DTYPES = ("float32", "float16", "bfloat16")
_STACKS = {"denoiser": "in U-Nets", "autoencoder": "in autoencoders"}


def describe_machine(machine: Machine) -> str:
    """Return the text: RAM, cores and disk, then each device with a table of its rates."""
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    lines = [f"{machine.cpu or 'a processor without a name'}, {cores}", "", *align(_memory(machine)), ""]
    lines += [*_limits(machine), _disk(machine)]
    for accelerator in machine.accelerators:
        lines += [
            "",
            _title(accelerator),
            "",
            *align(_rates(accelerator)),
            *_layouts(accelerator),
            "",
            _paths(accelerator),
        ]
    return "\n".join([*lines, *(f"note: {' '.join(note.split())}" for note in machine.notes)])


def _memory(machine: Machine) -> list[tuple[str, ...]]:
    rows = [("memory", "total", "free now"), ("RAM", format_bytes(machine.ram), _size(machine.ram_free))]
    cards = (accelerator for accelerator in machine.accelerators if not accelerator.is_cpu)
    return [*rows, *((card.name, format_bytes(card.bytes), _size(card.free)) for card in cards)]


def _limits(machine: Machine) -> list[str]:
    limit, pinnable = machine.ram_limit, machine.pinnable
    lines = [f"RAM: a control group's limit is {format_bytes(limit)}"] if limit else []
    if all(card.is_cpu for card in machine.accelerators):
        return [*lines, "page-locked RAM: none, there is no card to copy to"]
    return [*lines, f"page-locked RAM: {'not asked' if pinnable is None else f'up to {format_bytes(pinnable)} now'}"]


def _disk(machine: Machine) -> str:
    rate = machine.disk_rate
    return "disk: not measured" if rate is None else f"disk: {_bytes_per_second(rate)} read, past the page cache"


def _title(accelerator: Accelerator) -> str:
    parts = [f"{accelerator.name}: {accelerator.product_name or 'without a name'}"]
    if accelerator.compute_capability:
        parts.append(f"compute capability {accelerator.compute_capability}")
    if accelerator.multiprocessors and accelerator.clock:
        parts.append(f"{accelerator.multiprocessors} multiprocessors at {accelerator.clock / 1e9:.3g} GHz")
    return ", ".join(parts)


def _rates(accelerator: Accelerator) -> list[tuple[str, ...]]:
    rates = accelerator.arithmetic_rates
    masked = any(name.startswith("efficient-attention.") for name in rates)
    kinds = [*((kind, kind) for kind in _KINDS), *([("attention with a mask", "efficient-attention")] * masked)]
    rows = ((title, *(_operations(rates.get(f"{kind}.{dtype}")) for dtype in _DTYPES)) for title, kind in kinds)
    return [("operations per second", *_DTYPES), *rows]


def _layouts(accelerator: Accelerator) -> list[str]:
    """Table of the speedups of convolutions with channels last, as far as measured."""
    gains = accelerator.channels_last_gains
    dtypes = [dtype for dtype in _DTYPES if any(f"{role}.{dtype}" in gains for role in _STACKS)]
    cells = ((name, [gains.get(f"{role}.{dtype}") for dtype in dtypes]) for role, name in _STACKS.items())
    rows = [(name, *("not measured" if gain is None else f"{gain:.2f} ×" for gain in row)) for name, row in cells]
    return ["", *align([("convolutions with channels last", *dtypes), *rows])] if dtypes else []


def _paths(accelerator: Accelerator) -> str:
    parts = [f"memory {_bytes_per_second(accelerator.memory_rate)}"]
    if not accelerator.is_cpu:
        out = accelerator.link_rate_out or accelerator.link_rate
        parts.append(f"link {_bytes_per_second(accelerator.link_rate)} in, {_bytes_per_second(out)} out")
    launch, module = (1e6 * each for each in (accelerator.launch_overhead, accelerator.module_overhead))
    parts.append(f"{launch:.3g} µs of the host for each operation, {module:.3g} µs for each call of a module")
    if accelerator.streamed_overhead:
        streamed, resident = (1e6 * each for each in (accelerator.streamed_overhead, accelerator.resident_overhead))
        parts.append(f"{streamed:.3g} µs for each streamed layer, {resident:.3g} µs for a resident one")
    return ", ".join(parts)


def _size(count: int | None) -> str:
    return "not asked" if count is None else format_bytes(count)


def _bytes_per_second(rate: float | None) -> str:
    return "not measured" if rate is None else f"{format_bytes(rate)}/s"


def _operations(rate: float | None) -> str:
    """Format operations per second with three digits and a decimal unit: 1.16e11 is '116 G'."""
    if rate is None:
        return "not measured"
    for unit in ("", "k", "M", "G"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}".rstrip()
        rate /= 1000
    return f"{rate:.3g} T"
