"""A card's nominal figures → the rates that eager PyTorch reaches on it.

Nominal rates are those of data sheets: multiprocessors × clock × operations a clock. What a kernel sustains is less,
for three reasons that differ between cards: operands have to reach the tensor cores, the more so the more operations a
multiprocessor does a clock; many cards cannot draw the power that their nominal rate would need; and GeForce cards run
above their nominal clock. Sources: record 0081. `bench/clock.py` fits the values marked "fitted" to published times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNCERTAINTY", "Clock", "host_rates", "kernel_terms", "rates", "seconds_range", "sustained_share"]

# predicted by published time is off 1 by no more than this, nine times of ten, by fits that know nothing of the model
# (bench/results/clock.json)
UNCERTAINTY = 0.2
# what hosts took of what the clock says: steps of Stable Diffusion 1.5, in which an RTX 4090 and an A100 wait for the
# host, took 24 to 43 ms, and 28 are predicted (bench/published_times.json)
HOSTS = 0.84, 1.53


def seconds_range(seconds: float, host_seconds: float) -> tuple[float, float]:
    """Return the range of a call's predicted `seconds`, of which `host_seconds` are the host's work.

    A known card says nothing of the processor beside it, so the host's part is the less certain one.
    """
    of_card = max(seconds - host_seconds, 0.0)
    least, most = (host_seconds * factor for factor in HOSTS)
    return of_card / (1 + UNCERTAINTY) + least, of_card / (1 - UNCERTAINTY) + most


@dataclass(frozen=True)
class Clock:
    """The parameters. What differs between architectures is by compute capability; the rest holds for all cards."""

    # At so many operations a clock, a multiprocessor's tensor cores would wait for operands half of the time: in matrix
    # products (not on 9.0 to 10.3, where hardware fetches operands by itself), in convolutions, in attention.
    matmul_feed: float = 6000.0
    convolution_feed: float = 3546.0  # fitted
    attention_feed: float = 8000.0
    # of the nominal rate: what FlashAttention-2's instructions reach at most
    attention_share: Mapping[str, float] = field(default_factory=lambda: {"9.0": 0.63, "10.0": 0.63})
    # of flash attention's rate: memory-efficient attention's, by a call that was published with a mask and without; and
    # before 8.0, where there is no flash attention (fitted)
    efficient_share: float = 0.57
    early_share: float = 0.261
    # operations a second that a watt sustains in half precision
    per_watt: Mapping[str, float] = field(
        default_factory=lambda: {
            "7.0": 0.32e12, "7.5": 0.34e12, "8.0": 0.85e12, "8.6": 0.41e12, "8.9": 0.78e12, "9.0": 0.87e12,
            "10.0": 1.3e12, "12.0": 0.75e12,
        }
    )  # fmt: skip
    # likewise in single precision: a T4 sustains half of its nominal rate
    per_watt_single: Mapping[str, float] = field(default_factory=lambda: {"7.5": 0.06e12})
    # of the clock that is left under sustained load, between none and a published trace of 1200 of 1410 MHz
    sustained: Mapping[str, float] = field(default_factory=lambda: {"8.0": 0.88})
    boost: float = 1.057  # of GeForce cards' clock over its nominal value (fitted)
    tail: float = 0.314  # see Accelerator.tail (fitted)
    memory: float = 0.75  # of the nominal memory rate: what copies reach on A100 and T4, GeForce cards more
    cache: float = 7.645  # bytes that the second-level cache gives a multiprocessor a clock (fitted)
    single: float = 0.85  # of the nominal rate: products in single precision without tensor cores
    latency: float = 4e-6  # seconds in which a kernel starts and ends
    # host seconds: measured on a slow server core with torch's own CUDA code and kernels that do nothing (3.9 us for
    # each kernel, 16.8 us for each call of a module), times a factor that published host-bound times ask for (fitted);
    # and 4 us a launch in the driver
    host: float = 1.821
    kernel_host: float = 3.9e-6
    module_host: float = 16.8e-6
    driver: float = 4e-6


TENSOR_CORES = ("float16", "bfloat16", "float8")
CORES = {"6.0": 64, "7.0": 64, "7.5": 64, "8.0": 64}  # float32 cores of a multiprocessor; 128 on all others


def rates(facts: Mapping[str, Any], clock: Clock | None = None) -> dict[str, Any]:
    """Return the fields of an Accelerator that say how fast a card of the catalog is."""
    clock = clock or Clock()
    capability, nominal = facts["compute_capability"], facts["arithmetic_rates"]
    boost = sustained_share(capability, facts["title"], clock)
    processors: int = facts["multiprocessors"]
    hertz = boost * nominal["float32"] / (2 * CORES.get(capability, 128) * processors)
    found: dict[str, float] = {}
    for dtype in TENSOR_CORES:
        if dtype in nominal:
            found |= _tensor_cores(dtype, boost * nominal[dtype], processors * hertz, facts, clock)
    single = clock.single * boost * nominal["float32"]
    if capability in clock.per_watt_single:
        single = min(single, facts["watts"] * clock.per_watt_single[capability])
    found |= {"matmul.float32": single, "attention.float32": single, "convolution.float32": single}
    if "tensorfloat32" in nominal:  # in which torch computes convolutions, and attention in three products for one
        most = _fed(boost * nominal["tensorfloat32"], clock.convolution_feed / 2 * processors * hertz)
        found["convolution.float32"] = min(most, facts["watts"] * clock.per_watt[_generation(capability)] / 2)
        found["attention.float32"] = max(single, most / 3)
    memory_rate = clock.memory * facts["memory_rate"]
    return {
        "arithmetic_rates": found,
        "memory_rate": memory_rate,
        **kernel_terms(processors, hertz, facts["l2_bytes"], memory_rate, clock),
    }


def sustained_share(capability: str, name: str, clock: Clock | None = None) -> float:
    """Return the share of its nominal clock at which the card of that product `name` runs under load."""
    clock = clock or Clock()
    return clock.boost if "GeForce" in name else clock.sustained.get(capability, 1.0)


def kernel_terms(
    processors: int, hertz: float, cache_bytes: int, memory_rate: float | None = None, clock: Clock | None = None
) -> dict[str, Any]:
    """Return the fields of an Accelerator that refine kernels' times, of a card with `processors` multiprocessors.

    They run at `hertz` under load and share a second-level cache of `cache_bytes`. `memory_rate` is in bytes a second;
    None: not known yet.
    """
    clock = clock or Clock()
    return {
        "multiprocessors": processors,
        "clock": hertz,
        "tail": clock.tail,
        "cache_bytes": cache_bytes,
        "cache_rate": max(clock.cache * processors * hertz, memory_rate or 0.0),
        "kernel_latency": clock.latency,
    }


def host_rates(clock: Clock | None = None) -> dict[str, float]:
    """Return the fields of an Accelerator that say what the host does for each kernel and each call of a module."""
    clock = clock or Clock()
    return {
        "launch_overhead": clock.host * clock.kernel_host + clock.driver,
        "module_overhead": clock.host * clock.module_host,
    }


def _tensor_cores(
    dtype: str, nominal: float, clocks: float, facts: Mapping[str, Any], clock: Clock
) -> dict[str, float]:
    """Rates by kind in `dtype`; `clocks` a second of all multiprocessors together."""
    capability = facts["compute_capability"]
    generation = _generation(capability)
    if generation not in clock.per_watt or nominal <= 1.1 * facts["arithmetic_rates"]["float32"]:  # no tensor cores
        rate = clock.single * nominal
        return {f"{kind}.{dtype}": rate for kind in ("matmul", "convolution", "attention")}
    factor = 2 if dtype == "float8" else 1  # operations for the same power, and operands for the same bytes
    power = factor * facts["watts"] * clock.per_watt[generation]
    fetches = 9 <= float(capability) < 12  # operands by hardware of its own
    matmul = min(nominal if fetches else _fed(nominal, factor * clock.matmul_feed * clocks), power)
    convolution = min(_fed(nominal, factor * clock.convolution_feed * clocks), power)
    share = clock.attention_share.get(capability, 1.0)
    attention = min(_fed(share * nominal, factor * clock.attention_feed * clocks), power)
    efficient = clock.efficient_share * attention
    if float(capability) < 8:
        attention = efficient = clock.early_share * attention
    return {
        f"matmul.{dtype}": matmul,
        f"convolution.{dtype}": convolution,
        f"attention.{dtype}": attention,
        f"efficient-attention.{dtype}": efficient,
    }


def _fed(nominal: float, feed: float) -> float:
    """The rate of tensor cores with this `nominal` rate, where operands arrive at most for a rate of `feed`."""
    return 1 / (1 / nominal + 1 / feed)


def _generation(capability: str) -> str:
    return {"10.3": "10.0", "12.1": "12.0"}.get(capability, capability)
