"""Rates that were measured on this computer and stored on disk → Accelerators and their rates. Reads only.

The key contains everything that rates depend on: the devices, the processor and the threads that may use it, torch, and
the measuring code. A file that cannot be read counts as empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from tightfit.devices.choose import processor
from tightfit.devices.device import Device
from tightfit.errors import InputError
from tightfit.files import cache_folder, read_regular
from tightfit.schema.machine import Accelerator, Machine

__all__ = ["kept_file", "known_accelerator", "machine_key", "read_kept"]

_MEASURING = (
    "measure/rates.py",
    "measure/disk_rate.py",
    "measure/host_rates.py",
    "measure/layout_gains.py",
    "measure/equal_cards.py",
    "apply/weights/host_overheads.py",
    "catalog/clock.py",
    "schema/kernel_time.py",
)


def known_accelerator(device: Device) -> Accelerator:
    """Return the Accelerator of `device`, with its rates if measured; for a simulated card, its own one."""
    if device.kind == "simulated":
        from tightfit.devices.simulated import SimulatedDevice  # imported only if needed

        assert isinstance(device, SimulatedDevice)
        return device.card.accelerator
    here = Accelerator(
        name=device.name,
        kind=device.kind,
        bytes=device.total_bytes(),
        product_name=device.product_name() or processor(),
        compute_capability=device.compute_capability(),
        flash=device.has_flash(),
    )
    for key, fields in read_kept().items():
        with contextlib.suppress(InputError):
            machine = Machine.from_mapping(fields)
            same = [kept for kept in machine.accelerators if _who(kept) == _who(here)]
            if same and key == machine_key(machine):  # measured with this torch, these threads and this code
                return same[0]
    return here


def _who(accelerator: Accelerator) -> tuple[str | None, ...]:
    return accelerator.name, accelerator.product_name, accelerator.compute_capability


def kept_file() -> Path:
    return cache_folder() / "machine.json"


def read_kept() -> dict[str, Any]:
    """Return the stored fields of Machines, not yet validated, by `machine_key`."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        kept = json.loads(read_regular(kept_file()))
        if isinstance(kept, dict):
            return kept
    return {}


def machine_key(machine: Machine) -> str:
    """The key under which the rates of `machine` are stored."""
    cards = [
        (
            card.name,
            card.product_name,
            card.compute_capability,
            round(card.bytes / 2**30),
        )  # total RAM differs slightly between boots
        for card in machine.accelerators
    ]
    depends = (cards, machine.cpu, machine.cores, torch.get_num_threads(), version("torch"))
    digest = hashlib.sha256(json.dumps(depends).encode())
    for name in _MEASURING:
        digest.update(Path(str(files("tightfit") / name)).read_bytes())
    return digest.hexdigest()
