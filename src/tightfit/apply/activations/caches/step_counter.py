"""Which denoising step, and which guidance prediction of it, a call of a denoiser belongs to."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.outputs import are_equal

__all__ = ["CallSequence", "DenoiserCall", "StepCounter", "call_inputs", "call_shapes", "parameter_names"]


@dataclass(frozen=True)
class DenoiserCall:
    """The place of a call in the denoising loop."""

    step: int  # counted from 0
    steps: int | None  # number of steps of the pipeline's call; None: unknown
    branch: str | int  # which of a step's guidance predictions: the pipeline's name for it, or a number


class CallSequence:
    """The calls of a denoising step by their keys, which tell what comes next in the step after it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin another call of the pipeline."""
        self._step = -1
        self._now = list[tuple[Hashable, str | int]]()  # keys and branches of the calls of this step, …
        self._before = list[tuple[Hashable, str | int]]()  # … and of the one before

    def note(self, key: Hashable, call: DenoiserCall) -> None:
        """Note a call that begins."""
        if call.step != self._step:
            self._before, self._now, self._step = self._now, [], call.step
        self._now.append((key, call.branch))

    def next(self, steps: int | None) -> tuple[Hashable, DenoiserCall | None]:
        """Return the key and the place of the call after this one, of `steps` steps, if they go on as in the last one.

        None for both where that is not known, and after the last call.
        """
        done = len(self._now)
        if not self._before or self._now != self._before[:done]:
            return None, None
        same = done < len(self._before)
        (key, branch), step = self._before[done if same else 0], self._step + (not same)
        return (key, DenoiserCall(step, steps, branch)) if steps is None or step < steps else (None, None)


class StepCounter:
    """Counts the denoising steps of a pipeline's call.

    diffusers' pipelines name each of their guidance predictions by `cache_context`. Where they do not, two calls in a
    row belong to the same step if they are given the same latents, or other ones with the same timestep.
    """

    def __init__(self, steps: Callable[[], int | None]) -> None:
        """`steps` returns how many steps the pipeline's call takes, if that is known by now."""
        self._steps = steps
        self.context: str | None = None  # the pipeline's name for the calls to come
        self.clear()

    def clear(self) -> None:
        """Begin another call of the pipeline."""
        self._step = -1
        self._branches: set[str | int] = set()  # of this step
        self._latents: tuple[tuple[weakref.ref[torch.Tensor], int], ...] = ()
        self._timestep: torch.Tensor | None = None

    @property
    def steps_counted(self) -> int:
        """Number of steps so far."""
        return self._step + 1

    def count(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        """Return the place of a call of `network` with these arguments."""
        branch: str | int
        if self.context is not None:
            branch, begins = self.context, self.context in self._branches or self._step < 0
        else:
            begins = self._step < 0 or not self._same_step(network, args, kwargs)
            branch = 0 if begins else len(self._branches)
        if begins:
            self._step += 1
            self._branches.clear()
            given = call_inputs(network, args, kwargs)
            self._latents = tuple(
                (weakref.ref(each), _version(each)) for each in _tensors(next(iter(given.values()), None))
            )
            timestep = given.get("timestep", given.get("timesteps"))
            compares = self.context is None and isinstance(timestep, torch.Tensor)
            self._timestep = timestep if compares else None
        self._branches.add(branch)
        return DenoiserCall(self._step, self._steps(), branch)

    def naming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return diffusers' `cache_context`, which also names the calls within here."""

        @contextlib.contextmanager
        def context(network: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
            before, self.context = self.context, name
            try:
                with original(network, name, *args, **kwargs):
                    yield
            finally:
                self.context = before

        return context

    def _same_step(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = call_inputs(network, args, kwargs)
        latents = list(_tensors(next(iter(given.values()), None)))
        if len(latents) == len(self._latents) and all(
            known() is each and version == _version(each)
            for each, (known, version) in zip(latents, self._latents, strict=True)
        ):
            return True
        timestep = given.get("timestep", given.get("timesteps"))
        return (
            isinstance(timestep, torch.Tensor)
            and self._timestep is not None
            and (timestep is self._timestep or are_equal(timestep, self._timestep))
        )


_names: weakref.WeakKeyDictionary[type[nn.Module], list[str]] = weakref.WeakKeyDictionary()


def parameter_names(kind: type[nn.Module]) -> list[str]:
    """Return the names of the parameters of `kind`'s forward pass, in their order."""
    if kind not in _names:  # to look takes longer than some blocks do
        _names[kind] = list(inspect.signature(kind.forward).parameters)[1:]
    return _names[kind]


def call_inputs(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the parameters."""
    names = parameter_names(type(network))
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given.pop(name) for name in names if name in given} | given


def call_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
    """Return the shapes and dtypes of the tensors of a call, in order."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None
        for leaf in tree_leaves((args, kwargs))
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
