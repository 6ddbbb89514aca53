"""Weight stores: where weights are while they are not on the device, by the names in a plan's `offload_to`.

`STORES` is the registry, with what planning and explaining need to know of each. How a store sends its weights is a
subclass of `WeightStore` in apply/weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from tightfit.schema.machine import Accelerator, Machine

__all__ = [
    "NO_RATES",
    "ORDINARY_DISK",
    "STORES",
    "OffloadTarget",
    "StoreKind",
    "StoreRates",
    "default_store",
    "default_store_rates",
]

StoreRates = Mapping[str, float]  # bytes per second by store; those left out are as fast as the link
NO_RATES: StoreRates = MappingProxyType({})


@dataclass(frozen=True)
class StoreKind:
    """What is known of a weight store before there are weights in it."""

    title: str  # in sentences, after "from the"
    is_host_memory: bool  # plain tensors in host memory: nothing is loaded where that is the device's own memory
    ram_share: float  # bytes of RAM that it takes for each byte of weights
    padding: int  # bytes that a layer with a weight and a bias takes on the device in addition, to be aligned there
    in_files: bool = False  # whether weights that are in files already can stay there
    rate: Callable[[Machine], float | None] = lambda machine: None  # bytes per second; None: as fast as the link
    guessed_rate: float | None = None  # bytes per second on a CPU, where it was not measured

    def ram_bytes(self, size: int, ranks: int = 1) -> int:
        """Return the bytes of RAM that each of `ranks`, which share one copy, counts for `size` bytes of weights."""
        return math.ceil(size * self.ram_share / (ranks if self.is_host_memory else 1))


ORDINARY_DISK = 1e9  # bytes per second
STORES: Mapping[str, StoreKind] = {
    "cpu": StoreKind(
        "host memory",
        is_host_memory=True,
        ram_share=1.0,
        padding=4 * 256,  # of four tensors in a flat buffer
    ),
    "disk": StoreKind(
        "disk",
        is_host_memory=False,
        ram_share=0.0,
        padding=4 * 4096,  # sectors around each tensor are read too
        in_files=True,
        rate=lambda machine: machine.disk_rate,
        guessed_rate=ORDINARY_DISK,
    ),
}


def _check_store(name: Any) -> str:
    if not isinstance(name, str) or name not in STORES:
        *others, last = map(repr, STORES)
        raise PydanticCustomError("literal_error", f"Input should be {', '.join(others)} or {last}")
    return name


OffloadTarget = Annotated[str, BeforeValidator(_check_store)]  # a name in STORES, also of a store that was added to it


def default_store(*, spare_ram: bool) -> str:
    """Return the store that takes the least RAM if that is to be spared, else the first that is host memory."""
    if spare_ram:
        return min(STORES, key=lambda name: STORES[name].ram_share)
    return next(name for name, kind in STORES.items() if kind.is_host_memory)


def default_store_rates(machine: Machine, accelerator: Accelerator) -> StoreRates:
    """Return the rates measured on `machine`, and guesses for a CPU, whose own memory is no store."""
    guessed = {name: kind.guessed_rate if accelerator.is_cpu else None for name, kind in STORES.items()}
    rates = {name: kind.rate(machine) or guessed[name] for name, kind in STORES.items()}
    return {name: rate for name, rate in rates.items() if rate}
