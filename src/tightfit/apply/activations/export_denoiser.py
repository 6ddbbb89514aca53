"""Networks that are exported once and from then on run without their Python code.

Exporting (`torch.export`) follows one call of the network on torch's "meta" device, which computes nothing; the result
is a list of ATen operations for the shapes and settings of that call. They run on the live network's weights, looked up
anew for each operation: weights may be offloaded, stored in eight bits or moved, and the numbers are those of the
network's own code. What was exported on one device runs on any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._pytree import TreeSpec, tree_map_only, tree_unflatten

from tightfit.apply.activations.exported.file import ExportedFile, Manifest, TensorForm
from tightfit.apply.activations.exported.graph import graph_of
from tightfit.apply.activations.exported.signature import by_name, check_plain, marks_of, split
from tightfit.apply.activations.exporting import HERE, NotExported, export, without_weights
from tightfit.errors import ModelError, PlanError, unknown_name
from tightfit.measure.modules import find_components, find_role, weight_tensors

__all__ = ["export_denoiser", "export_module", "find_denoiser", "first_call"]


def export_denoiser(pipe: Any, call: Mapping[str, Any], name: str | None = None) -> ExportedFile:
    """Export the denoiser of `pipe` for the shapes and settings of its first call in `pipe(**call)`.

    The pipeline's call is stopped there (a generator among its arguments has been used by then). `name` selects the
    network if there are several. `pipe` may also be a module; then `call` holds its own arguments.

    Raises ModelError, naming the operation or the module, for what cannot be exported, AlreadyFitted if the denoiser
    follows a plan, PlanError for an unknown name.
    """
    if isinstance(pipe, nn.Module):
        return export_module(pipe, **call)
    module = find_denoiser(pipe, name)
    check_plain(module)
    with torch.random.fork_rng(devices=[]):
        args, kwargs = first_call(module, lambda: pipe(**call))
    return export_module(module, *args, **kwargs)


def find_denoiser(pipe: Any, name: str | None = None) -> nn.Module:
    """Return the network `name` of `pipe`; without a name its denoiser, of several the transformer or U-Net.

    PlanError for an unknown name, or if there is not exactly one denoiser.
    """
    components = find_components(pipe)
    if name is not None and name not in components:
        raise PlanError(unknown_name("component", name, components), name=name)
    denoisers = [found for found, part in components.items() if find_role(found, part) == "denoiser"]
    usual = [found for found in denoisers if found in ("transformer", "unet")]
    chosen = [name] if name is not None else usual or denoisers
    if len(chosen) != 1:
        there = ", ".join(chosen) or "none"
        raise PlanError(f"{type(pipe).__name__} has not one denoiser but {there}: name the one to export")
    return components[chosen[0]]


class _FirstCall(BaseException):
    """Stops a call at its denoiser. A BaseException, so that no `except Exception` on the way catches it."""


def first_call(module: nn.Module, work: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run `work` until it first calls `module`; return that call's positional and keyword arguments.

    ModelError if `work` ends without calling it.
    """
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((args, kwargs))
        raise _FirstCall

    hook = module.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
    try:
        work()
    except _FirstCall:
        return given[0]
    finally:
        hook.remove()
    raise ModelError(f"the call came to its end without its {type(module).__name__}: there is nothing to export")


def export_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> ExportedFile:
    """Export `module` for calls with arguments like these; of tensors, only shapes and dtypes count."""
    check_plain(module)
    _check_weights(module)
    kind = type(module).__name__
    arguments = by_name(inspect.signature(module.forward), args, kwargs)
    tensors, settings = split(arguments)
    program = _exported(kind, without_weights(module), arguments)
    manifest = Manifest(
        **marks_of(module),
        inputs={name: TensorForm.of(tensor) for name, tensor in tensors.items()},
        settings=settings,
        returns=_returns(kind, program.call_spec.out_spec),
    )
    graph = graph_of(program, [*tensors])
    return ExportedFile(
        manifest, graph, {name: _table(kind, name, program.constants[name]) for name in graph.constants}
    )


def _table(kind: str, name: str, constant: torch.Tensor) -> torch.Tensor:
    """Return a constant tensor of `kind`'s code as it is stored; ModelError if it has no values."""
    if constant.is_meta:
        raise ModelError(f"{kind} makes a table, {name}, of numbers of its own: it cannot be exported", name=kind)
    return constant.detach().clone(memory_format=torch.contiguous_format)


def _exported(kind: str, module: nn.Module, arguments: dict[str, Any]) -> ExportedProgram:
    given = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=HERE), arguments)
    try:
        return export(module, (), given)
    except NotExported as error:
        raise ModelError(f"{kind} cannot be exported: {error}", name=kind) from error


def _check_weights(module: nn.Module) -> None:
    """Raise ModelError for weights of tensor subclasses, for which other operations would be exported."""
    for tensor in weight_tensors(module):
        plain = tensor.detach()
        if type(plain) is not torch.Tensor:
            kind = type(plain).__name__
            raise ModelError(f"{type(module).__name__} has weights of type {kind}, which cannot be exported", kind=kind)


def _returns(kind: str, spec: TreeSpec) -> str:
    """Return "tensor" or "tuple" (of tensors), as `kind` does; ModelError for other outputs."""
    shape = tree_unflatten([0] * spec.num_leaves, spec)
    if shape == 0:
        return "tensor"
    if isinstance(shape, tuple | list) and set(shape) <= {0}:
        return "tuple"
    name = type(shape).__name__
    raise ModelError(f"{kind} returns a {name}, which cannot be exported: call it with return_dict=False", name=kind)
