"""All that can be done: each way in which denoisers may work, with all combinations of everything else.

Which there are depends on no budget. So more budget is never slower, and what a smaller budget accepts a larger one
does too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property

from tightfit.plan.branch import Branch, Found, Known
from tightfit.plan.parts import SEGMENT
from tightfit.records import Accelerator, Footprint, Storage

__all__ = ["Search", "Stored", "storages_of"]

Stored = Mapping[str, Storage]

_ALL = 2**60


class Search:
    """What `device` could do in the call that `footprint` tells of, with components stored in one way."""

    def __init__(
        self,
        footprint: Footprint,
        device: Accelerator,
        disk_rate: float | None,
        storages: Stored,
        known: dict[int, Known] | None = None,
    ) -> None:
        """`known` is what was worked out already of the same call on devices as fast, by the number of the variant."""
        self.footprint, self.device, self.disk_rate = footprint, device, disk_rate
        self._storages, self._known = storages, {} if known is None else known

    @cached_property
    def _branches(self) -> list[Branch]:
        """The usual way of working, and the others."""
        about = self.device, self.disk_rate, self._storages
        known = [self._known.setdefault(number, Known()) for number in range(len(self.footprint.variants) + 1)]
        usual = Branch(self.footprint, *about, known=known[0])
        others = zip(self.footprint.variants, known[1:], strict=True)
        return [
            usual,
            *(Branch(self.footprint.varied(other), *about, other, usual, known=menus) for other, menus in others),
        ]

    def best(self, size: int, ram: int | None) -> Found | None:
        """The best within `size` bytes of the device and `ram` of host memory (None: as many as wanted), if any."""
        best: Found | None = None
        chances = [chance for branch in self._branches for chance in branch.chances(size, ram)]
        for chance in sorted(chances, key=lambda chance: chance.soonest):
            if best is not None and chance.soonest > best.seconds:
                break
            found = chance.branch.find(chance, size, ram)
            if found is not None and (best is None or found[:3] < best[:3]):
                best = found
        return best

    def soonest(self, size: int, ram: int | None) -> float | None:
        """Seconds that anything within so much takes at the least; None where it is certain that nothing fits."""
        chances = (chance.soonest for branch in self._branches for chance in branch.chances(size, ram))
        return min(chances, default=None)

    def least(self, ram: int | None) -> int | None:
        """The fewest bytes of the device with which anything fits; None if nothing ever does."""
        return _fewest(lambda size: self.fits(size, ram))

    def least_ram(self, size: int) -> int | None:
        """The same of host memory."""
        return _fewest(lambda ram: self.fits(size, ram))

    def fits(self, size: int, ram: int | None) -> bool:
        """Whether anything does."""
        chances = (chance for branch in self._branches for chance in branch.chances(size, ram))
        return any(chance.branch.holds(chance, size, ram) for chance in chances)


def storages_of(footprint: Footprint, allowed: Collection[str]) -> Iterator[Stored]:
    """In what components are stored: as they are; where that does not fit, more and more of them in eight bits."""
    yield {}
    storages: list[Storage] = ["float8_e4m3fn"] * ("fp8" in allowed) + ["int8"] * ("int8" in allowed)  # type: ignore[assignment]
    roles = {role: [c.name for c in footprint.components if c.role == role] for role in ("denoiser", "encoder")}
    for storage in storages:
        for some in ([roles["denoiser"]], [roles["encoder"]], [*roles.values()]):
            yield {name: storage for names in some for name in names}


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The fewest whole segments of bytes that are `enough`; None if no number is."""
    most = 1
    while not enough(most * SEGMENT):
        most *= 2
        if most * SEGMENT > _ALL:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle * SEGMENT) else (middle, most)
    return most * SEGMENT
