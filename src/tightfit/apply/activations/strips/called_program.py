"""The program of an autoencoder's call: its exported graph, from the cache if it is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from tightfit.apply.activations.exporting import HERE, NotExported, play, without_weights
from tightfit.apply.activations.outputs import take_apart
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph, capture
from tightfit.apply.activations.strips.graph_cache import kept_program, mark_of_call
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.workarounds import work_around

__all__ = ["Rebuild", "program_of", "to_export"]

Rebuild = Callable[[Sequence[torch.Tensor]], Any]


def program_of(
    module: nn.Module, kind: type[nn.Module], method: str, first: torch.Tensor, leaves: Sequence[Any], form: Any
) -> tuple[Program, str, Rebuild]:
    """Return the program of a call of `module`'s `method`, its cache key, and a function that rebuilds its output.

    `module` is an instance of `kind`; its arguments are `first` and `leaves`, flattened, with tree spec `form`. Raises
    UnsupportedGraph.
    """
    rebuild: list[Rebuild] = []

    def call(double: Any, first: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        left = iter(others)
        args, kwargs = tree_unflatten([next(left) if isinstance(x, torch.Tensor) else x for x in leaves], form)
        tensors, together = take_apart(getattr(double, method)(first, *args, **kwargs))
        rebuild[:] = [together]
        return tensors

    double, given = to_export(module, kind, (first, *leaves))
    mark = mark_of_call(double, method, form, (first, *leaves))
    work_around(double)
    program = kept_program(mark, double, given, lambda: capture(double, call, given))
    if not rebuild:  # the program was cached, so the type of the output is not known yet
        with contextlib.suppress(NotExported):
            play(lambda: call(double, *given))
    if not rebuild:
        program = capture(double, call, given)
    return program, mark, rebuild[0]


def to_export(module: nn.Module, kind: type[nn.Module], leaves: Sequence[Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return `module`, an instance of `kind`, without weights, and tensors like those of `leaves`, for an export.

    Raises UnsupportedGraph.
    """
    with torch.inference_mode(False):
        given = [torch.empty(x.shape, dtype=x.dtype, device=HERE) for x in leaves if isinstance(x, torch.Tensor)]
        try:
            return without_weights(module, kind), given
        except NotExported as error:
            raise UnsupportedGraph(str(error)) from error
