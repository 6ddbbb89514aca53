"""Weight stores: where weights are while they are not on the device, by the names in a plan's `offload_to`.

`STORES` is the registry, with what planning and explaining need to know of each. How a store sends its weights is a
subclass of `WeightStore` in apply/weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tightfit.schema.machine import Accelerator, Machine

__all__ = [
    "NO_RATES",
    "ORDINARY_DISK",
    "STORES",
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
    in_ram: bool  # whether weights there take host memory
    padding: int  # bytes that a layer with a weight and a bias takes on the device in addition, to be aligned there
    rate: Callable[[Machine], float | None] = lambda machine: None  # bytes per second; None: as fast as the link
    guessed_rate: float | None = None  # bytes per second, where it was not measured


ORDINARY_DISK = 1e9  # bytes per second
STORES: Mapping[str, StoreKind] = {
    "cpu": StoreKind("host memory", in_ram=True, padding=4 * 256),  # for four tensors in a flat buffer
    "disk": StoreKind(
        "disk", in_ram=False, padding=4 * 4096, rate=lambda machine: machine.disk_rate, guessed_rate=ORDINARY_DISK
    ),  # sectors around each tensor are read too
}


def default_store(*, spare_ram: bool) -> str:
    """Return the first store that takes no host memory if that is to be spared, else the first that is host memory."""
    return next(name for name, kind in STORES.items() if kind.in_ram != spare_ram)


def default_store_rates(machine: Machine, accelerator: Accelerator) -> StoreRates:
    """Return the rates measured on `machine`; for a CPU, which cannot offload to its own memory, guesses for others."""
    guessed = {name: kind.guessed_rate if accelerator.is_cpu else None for name, kind in STORES.items()}
    rates = {name: kind.rate(machine) or guessed[name] for name, kind in STORES.items()}
    return {name: rate for name, rate in rates.items() if rate}
