"""What stands for weights that are away, and what becomes of what others write there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.away import LazyWeight, OffloadedParameter
from tightfit.apply.weights.homes import version_of, write_back
from tightfit.apply.weights.parcels import WeightGroup
from tightfit.apply.weights.shelf import FileBackedWeights
from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder

__all__ = ["LazyWeights", "Versions", "versions_of"]

Versions = list[tuple[Any, ...]]


class LazyWeights:
    """For each parcel a tensor for each of its weights, which fetches it by `fetch(parcel, number)`."""

    def __init__(
        self,
        parcels: Sequence[WeightGroup],
        device: Device,
        recorder: Recorder,
        fetch: Callable[[WeightGroup, int], torch.Tensor],
    ) -> None:
        self._device, self._recorder, self._fetch = device, recorder, fetch
        self._of: dict[WeightGroup, list[OffloadedParameter]] = {}
        self._absences: dict[WeightGroup, list[LazyWeight]] = {}  # the same, where to look takes less time
        for parcel in parcels:
            self.renew(parcel)

    def __getitem__(self, parcel: WeightGroup) -> list[OffloadedParameter]:
        return self._of[parcel]

    def renew(self, parcel: WeightGroup) -> None:
        """The parcel's weights are laid out in another way by now."""
        self._of[parcel] = list(self._made(parcel))
        self._absences[parcel] = [away.absence for away in self._of[parcel]]

    def _made(self, parcel: WeightGroup) -> Iterator[OffloadedParameter]:
        for index, (master, like) in enumerate(zip(parcel.masters, parcel.likes, strict=True)):
            away = OffloadedParameter.standing_for(like, self._device.torch_device, self._fetching(parcel, index))
            yield nn.Parameter(away, master.requires_grad)  # type: ignore[misc]

    def _fetching(self, parcel: WeightGroup, index: int) -> Callable[[], torch.Tensor]:
        return lambda: self._fetch(parcel, index)

    def any_written(self, parcel: WeightGroup) -> bool:
        """Whether others wrote into one of the parcel's weights."""
        for absence in self._absences[parcel]:  # noqa: SIM110 - a generator takes three times as long
            if absence.written is not None:
                return True
        return False

    def with_written(self, parcel: WeightGroup, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """`weights`, which have come from their home, with what others wrote in its place."""
        return [
            weight
            if away.absence.written is None
            else nn.Parameter(away.absence.value(away.device), away.requires_grad)
            for away, weight in zip(self._of[parcel], weights, strict=True)
        ]

    def keep_changed(self, parcel: WeightGroup, weights: list[nn.Parameter], versions: Versions) -> None:
        """Somebody wrote into weights that will be forgotten (a LoRA fused in a callback, say)."""
        for away, weight, version in zip(self._of[parcel], weights, versions, strict=True):
            if versions_of([weight]) != [version]:
                with torch.no_grad(), self._recorder.uncounted():
                    away.absence.written = weight.detach().clone()

    def keep(self, parcel: WeightGroup) -> None:
        """What others wrote while the weights were here, or away, goes into the masters, or stays in RAM."""
        self._take_up(parcel)
        for away, master in zip(self._of[parcel], parcel.masters, strict=True):
            written = away.absence.written
            if written is None:
                continue
            with torch.no_grad(), self._recorder.uncounted():
                if not parcel.home.writable:
                    away.absence.written = self._device.to_host(written)
                    continue
                write_back(master, written, self._device)
                self._recorder.moved(bytes_out=written.nbytes)
                away.absence.written = None

    def _take_up(self, parcel: WeightGroup) -> None:
        """What others put in the place of a weight that was away (`module.to(dtype)` may) has its home from now on."""
        if parcel.home.writable:
            ours = {*map(id, parcel.masters), *map(id, self._of[parcel])}
            for index, there in parcel.put_by_others(ours):
                self._of[parcel][index].absence.written = there.detach()

    def set_aside(self) -> None:
        """Where masters have no values, modules find what stands for them, from now on."""
        for parcel in self._valueless():
            parcel.show(parcel.masters, self._of[parcel])

    def give_back(self, shelf: FileBackedWeights | None = None) -> None:
        """Masters without values have them again, as others wrote them, and modules find them.

        With a `shelf`, modules find shapes there, but for what others wrote into.
        """
        for parcel in self._valueless():
            if shelf is not None and not any(away.absence.written is not None for away in self._of[parcel]):
                parcel.show(self._of[parcel], parcel.shapes(shelf))
                continue
            parcel.fill()
            self._write_back(parcel)
            parcel.show(self._of[parcel], parcel.masters)

    def _valueless(self) -> Iterator[WeightGroup]:
        return (parcel for parcel in self._of if not parcel.home.writable)

    def _write_back(self, parcel: WeightGroup) -> None:
        """The masters, which have come from their home, are as others wrote them."""
        for away, master in zip(self._of[parcel], parcel.masters, strict=True):
            written = away.absence.written
            if written is None:
                continue
            if (written.dtype, written.shape) == (master.dtype, master.shape):
                master.data.copy_(written)
            else:
                master.data = written.to(master.device)


def versions_of(weights: Sequence[torch.Tensor]) -> Versions:
    """What changes when somebody writes into `weights`, or gives them other data."""
    return [
        (weight._version, weight.data_ptr(), weight.dtype) if type(weight) is nn.Parameter else version_of(weight)
        for weight in weights  # to call for each, and to ask what is inside, takes longer than all of this
    ]
