"""Random numbers on the device are the CPU's: `torch.Generator("privateuseone")` is a generator of the CPU.

torch asks the C++ hooks of a device for a generator, and those of a device written in Python make none
(`PythonHooks::getNewGenerator` in torch/csrc/acc/Module.cpp, torch 2.11 to 2.13). All that takes a generator on the
device takes the CPU's. So while cards are in use, `torch.Generator` is a class that makes one of those where the
device is asked for, and does what torch's own does otherwise; `use_cards(())` puts torch's own back.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["offer_generators"]

_torchs = torch.Generator


class _Kind(type):
    """Every generator is an instance of `torch.Generator`, whoever made it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torchs)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _torchs)


class Generator(metaclass=_Kind):
    """What stands in for `torch.Generator`."""

    def __new__(cls, device: Any = None) -> Any:
        place = torch.device("cpu" if device is None else device)
        ours = place.type == torch._C._get_privateuse1_backend_name()
        return _torchs("cpu" if ours else place)


def offer_generators(offered: bool) -> None:
    """Whether `torch.Generator` knows the device from now on."""
    torch.Generator = Generator if offered else _torchs  # type: ignore[misc]
