"""A device whose copies come late, for tests of what must wait for them."""

from __future__ import annotations

import torch

from tightfit.devices.copy_stream import LateCopyStream
from tightfit.devices.device import LoopbackDevice


class LateDevice(LoopbackDevice):
    """A card whose copies come at the last moment: what is used without waiting for it has not come.

    Copies from plain host memory go through staging, as on a real card.
    """

    plain_copies_block = True

    def copy_stream(self) -> LateCopyStream:
        return LateCopyStream()

    def allocate(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every floating format
