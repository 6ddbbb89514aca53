"""A network's call → ATen's operations in their order, by torch.export, on a device that computes nothing."""

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
HERE = "meta"  # the device on which networks are exported, and which stands for that on which they will work


class NotExported(Exception):
    """What is in torch.export's way, on one line."""


def export(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, functional: bool = False
) -> ExportedProgram:
    """`module(*args, **kwargs)` as torch exports it; its weights and the tensors among the arguments are on HERE.

    With `functional` no operation writes into anything: those that do are put in other words. Whoever counts bytes
    meanwhile sees nothing: there are none. Raises NotExported.
    """
    with _unseen():
        exported: ExportedProgram = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        if functional and any(map(_writes, exported.graph.nodes)):
            exported = exported.run_decompositions({})
        return exported


def play(work: Callable[[], Result]) -> Result:
    """What `work` gives, done on HERE by shapes alone: in a hundredth of the time. Raises NotExported."""
    with _unseen():
        return work()


def without_weights(module: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """A copy of `module` with shapes on HERE in place of its tensors, and without anybody's hooks.

    `kind` is its class, where the module has another one for the time being. Raises NotExported where weights are
    computed anew by a hook before each pass (torch's older weight norm): without hooks they would stay as they are.
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
    double = copy.copy(module)  # the class first: how to copy may be the disguise's affair
    object.__setattr__(double, "__class__", kind or type(module))
    return copy.deepcopy(double, known)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Nobody's modes see what is done inside; what goes wrong there is NotExported."""
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _disable_current_modes(),
            warnings.catch_warnings(action="ignore"),  # of its own code
            _no_stack_traces(),
            _NumbersInCode(),
        ):
            yield
    except Exception as error:  # torch.export's errors have no base in common
        cause = str(error).strip().splitlines() or [""]
        raise NotExported(f"{type(error).__name__}: {cause[0]:.300}") from error


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """torch does not look up which lines of code each operation comes from, which is a sixth of an export."""
    config = torch.fx.config  # older versions of it do not look at this
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _NumbersInCode(TorchFunctionMode):
    """Lets tensors that code makes of numbers keep those: made on the CPU first, as nothing on HERE has any."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = torch.device(kwargs.get("device") or "cpu")
        if func in (torch.tensor, torch.as_tensor) and device.type == HERE and not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)
