"""A network's call → ATen operations in order, by torch.export on the meta device, which computes nothing."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.measure.modules import weight_tensors

__all__ = ["HERE", "NotExported", "export", "play", "without_weights"]

Result = TypeVar("Result")

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
HERE = "meta"  # device of exported networks, and placeholder for the device they will run on


class NotExported(Exception):
    """The call cannot be exported; the message is the reason, on one line."""


def export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    functional: bool = False,
    decomposed: bool = False,
) -> ExportedProgram:
    """Export `module(*args, **kwargs)` by torch.export; its weights and tensor arguments are on HERE.

    With `functional`, operations that write into their arguments are replaced by ones that do not, if there are any;
    other operations then get other names, as they always do with `decomposed`. Active torch modes
    (that count bytes, for instance) do not see the export, which takes no memory. Raises NotExported.
    """
    with _unseen():
        exported: ExportedProgram = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        if decomposed or (functional and any(map(_writes, exported.graph.nodes))):
            exported = exported.run_decompositions({})
        return exported


def play(work: Callable[[], Result]) -> Result:
    """Return `work()`, run by shapes alone on HERE: in a hundredth of the time. Raises NotExported."""
    with _unseen():
        return work()


def without_weights(module: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """Return a copy of `module` with empty tensors on HERE in place of its weights, and without hooks.

    `kind` is its class, if the module temporarily has another one. Raises NotExported if a hook recomputes weights
    before each call (torch's older weight norm): without hooks they would never change.
    """
    for path, part in module.named_modules():
        if any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in vars(part).values()):
            raise NotExported(f"the weights of {path} are computed anew before each pass")
    known: dict[int, Any] = {}
    for tensor in weight_tensors(module):
        shape = torch.empty(tensor.shape, dtype=tensor.dtype, device=HERE)
        known[id(tensor)] = nn.Parameter(shape, requires_grad=False) if isinstance(tensor, nn.Parameter) else shape
    for part in module.modules():
        for name in _HOOKS:
            hooks = getattr(part, name)
            known[id(hooks)] = type(hooks)()
        known[id(part._compiled_call_impl)] = None
        if (registry := vars(part).get("_diffusers_hook")) is not None:  # it refers to the module
            if registry.hooks:
                raise NotExported(f"diffusers' hooks run in place of its code: {', '.join(registry.hooks)}")
            known[id(registry)] = None
    double = copy.copy(module)  # the class first: an overriding class may define its own way to copy
    object.__setattr__(double, "__class__", kind or type(module))
    return copy.deepcopy(double, known)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hide what is done inside from active torch modes, and turn its errors into NotExported."""
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _disable_current_modes(),
            warnings.catch_warnings(action="ignore"),  # about torch's own code
            _no_stack_traces(),
            _NumbersInCode(),
        ):
            yield
    except Exception as error:  # torch.export's errors have no common base class
        cause = str(error).strip().splitlines() or [""]
        raise NotExported(f"{type(error).__name__}: {cause[0]:.300}") from error


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Keep torch from looking up the source lines of each operation, which is a sixth of an export."""
    config = torch.fx.config  # older versions ignore this flag
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _NumbersInCode(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU first, so that they keep their values: those on HERE have none."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = torch.device(kwargs.get("device") or "cpu")
        if func in (torch.tensor, torch.as_tensor) and device.type == HERE and not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)
