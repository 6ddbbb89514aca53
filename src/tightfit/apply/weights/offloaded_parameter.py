"""Placeholder of a weight that is not on the device: a tensor that loads the weight when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.apply.weights.weight_store import version_of, write_back
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder

__all__ = ["LazyWeight", "LazyWeights", "OffloadedParameter", "Versions", "versions_of"]


_aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
_ALIASES = (_aten.detach.default, _aten.alias.default)


class LazyWeight:
    """An offloaded weight, shared by all aliases of its placeholder: how to load it, and its new value if changed."""

    def __init__(self, fetch: Callable[[], torch.Tensor]) -> None:
        self._fetch = fetch
        self.written: torch.Tensor | None = None  # the weight's new value, once other code changed it

    def take(self, data: torch.Tensor) -> None:
        """Make `data` the weight's value; in-place operators (`+=`) assign the placeholder itself, a no-op."""
        if not isinstance(data, OffloadedParameter):
            self.written = data.detach()
        elif data.lazy_weight is not self:
            self.written = data.lazy_weight.value(data.device)

    def value(self, device: torch.device) -> torch.Tensor:
        return self._fetch() if self.written is None else self.written.to(device)


class OffloadedParameter(torch.Tensor):
    """Placeholder of a weight, with the shape, strides and dtype of `like`; reports `device` as its device."""

    lazy_weight: LazyWeight

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, lazy_weight: LazyWeight) -> OffloadedParameter:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )

    def __init__(self, like: torch.Tensor, device: torch.device, lazy_weight: LazyWeight) -> None:
        self.lazy_weight = lazy_weight

    @classmethod
    def standing_for(
        cls, like: torch.Tensor, device: torch.device, fetch: Callable[[], torch.Tensor]
    ) -> OffloadedParameter:
        """Return a placeholder with the layout of `like` for a weight that `fetch` loads to `device`."""
        return cls(like, device, LazyWeight(fetch))

    # no __torch_function__: torch's Python functions may leave their fast path for one, which changes bits of results
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        return _DATA.__get__(self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        """Handle `weight.data = …`, as module.to(dtype) does."""
        _DATA.__set__(self, data)
        self.lazy_weight.take(data)

    def _whole(self) -> torch.Tensor:
        with torch.no_grad():
            value = self.lazy_weight.value(self.device).detach().clone(memory_format=torch.preserve_format)
        return nn.Parameter(value, self.requires_grad) if getattr(self, "_is_param", False) else value

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._whole()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return OffloadedParameter(args[0], args[0].device, args[0].lazy_weight)
        values: dict[int, torch.Tensor] = {}

        def present(away: OffloadedParameter) -> torch.Tensor:
            if id(away.lazy_weight) not in values:
                values[id(away.lazy_weight)] = away.lazy_weight.value(away.device)
            return values[id(away.lazy_weight)]

        result = func(
            *tree_map_only(OffloadedParameter, present, args), **tree_map_only(OffloadedParameter, present, kwargs)
        )
        back = {}
        for away in _written(func, args, kwargs):
            away.lazy_weight.written = values[id(away.lazy_weight)]
            back[id(away.lazy_weight.written)] = away
        return tree_map_only(torch.Tensor, lambda tensor: back.get(id(tensor), tensor), result) if back else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OffloadedParameter]:
    """Return the placeholders that `func` writes to, by its schema."""
    found: list[OffloadedParameter] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += [value for value in tree_leaves(given) if isinstance(value, OffloadedParameter)]
    return found


Versions = list[tuple[Any, ...]]


class LazyWeights:
    """For each group, a placeholder for each of its weights, which is loaded by `fetch(group, index)`."""

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        device: Device,
        recorder: Recorder,
        fetch: Callable[[WeightGroup, int], torch.Tensor],
    ) -> None:
        self._device, self._recorder, self._fetch = device, recorder, fetch
        self._of: dict[WeightGroup, list[OffloadedParameter]] = {}
        self._absences: dict[WeightGroup, list[LazyWeight]] = {}  # their lazy weights, which are faster to check
        for group in groups:
            self.renew(group)

    def __getitem__(self, group: WeightGroup) -> list[OffloadedParameter]:
        return self._of[group]

    def renew(self, group: WeightGroup) -> None:
        """Make new placeholders for the group, whose weights have changed shape, strides or dtype."""
        self._of[group] = list(self._made(group))
        self._absences[group] = [away.lazy_weight for away in self._of[group]]

    def _made(self, group: WeightGroup) -> Iterator[OffloadedParameter]:
        for index, (source_param, like) in enumerate(zip(group.source_params, group.likes, strict=True)):
            away = OffloadedParameter.standing_for(like, self._device.torch_device, self._fetching(group, index))
            yield nn.Parameter(away, source_param.requires_grad)  # type: ignore[misc]

    def _fetching(self, group: WeightGroup, index: int) -> Callable[[], torch.Tensor]:
        return lambda: self._fetch(group, index)

    def any_written(self, group: WeightGroup) -> bool:
        """Whether other code changed one of the group's weights."""
        for lazy_weight in self._absences[group]:  # noqa: SIM110 - a generator takes three times as long
            if lazy_weight.written is not None:
                return True
        return False

    def with_written(self, group: WeightGroup, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return `weights`, loaded from their store, with the new values of those that other code changed."""
        return [
            weight
            if away.lazy_weight.written is None
            else nn.Parameter(away.lazy_weight.value(away.device), away.requires_grad)
            for away, weight in zip(self._of[group], weights, strict=True)
        ]

    def keep_changed(self, group: WeightGroup, weights: list[nn.Parameter], versions: Versions) -> None:
        """Keep values of weights that other code changed (e.g. fused a LoRA in a callback), before they are freed."""
        for away, weight, version in zip(self._of[group], weights, versions, strict=True):
            if versions_of([weight]) != [version]:
                with torch.no_grad(), self._recorder.uncounted():
                    away.lazy_weight.written = weight.detach().clone()

    def keep(self, group: WeightGroup) -> None:
        """Write changes by other code to the source parameters, or keep them in RAM where those are in files."""
        self._take_up(group)
        for away, source_param in zip(self._of[group], group.source_params, strict=True):
            written = away.lazy_weight.written
            if written is None:
                continue
            with torch.no_grad(), self._recorder.uncounted():
                if not group.store.writable:
                    away.lazy_weight.written = self._device.to_host(written)
                    continue
                write_back(source_param, written, self._device)
                self._recorder.moved(bytes_out=written.nbytes)
                away.lazy_weight.written = None

    def _take_up(self, group: WeightGroup) -> None:
        """Take tensors that other code put in place of placeholders (as `module.to(dtype)` may) as new values."""
        if group.store.writable:
            ours = {*map(id, group.source_params), *map(id, self._of[group])}
            for index, there in group.put_by_others(ours):
                self._of[group][index].lazy_weight.written = there.detach()

    def set_aside(self) -> None:
        """Put the placeholders of source parameters without values into the modules."""
        for group in self._valueless():
            group.show(group.source_params, self._of[group])

    def give_back(self, file_weights: FileBackedWeights | None = None) -> None:
        """Load source parameters without values, with changes by other code, and put them into the modules.

        With `file_weights`, groups that were not changed stay in files, and modules get "meta" parameters of it; or in
        shared memory, and modules get parameters that take no memory.
        """
        for group in self._valueless():
            changed = any(away.lazy_weight.written is not None for away in self._of[group])
            if file_weights is not None and group.store.stored and not changed:
                group.show(self._of[group], group.shapes(file_weights))
                continue
            group.fill(None if file_weights is None or changed else file_weights.shared)
            self._write_back(group)
            group.show(self._of[group], group.source_params)

    def _valueless(self) -> Iterator[WeightGroup]:
        return (group for group in self._of if not group.store.writable)

    def _write_back(self, group: WeightGroup) -> None:
        """Write changes by other code to the source parameters, which are loaded."""
        for away, source_param in zip(self._of[group], group.source_params, strict=True):
            written = away.lazy_weight.written
            if written is None:
                continue
            if (written.dtype, written.shape) == (source_param.dtype, source_param.shape):
                source_param.data.copy_(written)
            else:
                source_param.data = written.to(source_param.device)


def versions_of(weights: Sequence[torch.Tensor]) -> Versions:
    """Return values that change when `weights` are written to or given other data."""
    return [
        (weight._version, weight.data_ptr(), weight.dtype) if type(weight) is nn.Parameter else version_of(weight)
        for weight in weights  # a call of version_of for each takes longer than all of this
    ]
