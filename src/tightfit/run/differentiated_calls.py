"""Simulated calls of denoisers with a backward pass after each, as in training or in guidance by gradients."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tightfit.apply.method_overrides import override_class_members
from tightfit.errors import InputError, RequestError, RunError
from tightfit.schema.footprint import Component, Footprint
from tightfit.schema.request import Request
from tightfit.simulator.card import SimulatedCard

__all__ = ["DifferentiatedCalls", "require_gradients", "with_gradients"]

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]  # layers that diffusers' training scripts adapt by default


def require_gradients(denoisers: dict[str, nn.Module], request: Request) -> None:
    """Make the parameters of `denoisers` require gradients as `request.backward` says.

    They have no weights yet, or anymore. RequestError without denoisers, or where a LoRA fits no layer; InputError
    without peft.
    """
    if not denoisers:
        raise RequestError(f"backward={request.backward} is for denoisers, and this pipeline has none")
    for name, module in denoisers.items():
        if request.lora_rank is not None:
            module.requires_grad_(False)
            if importlib.util.find_spec("peft") is None:
                raise InputError(f"backward={request.backward} needs peft, which adds the LoRA: pip install peft")
            _add_lora(name, module, request.lora_rank)
        elif request.backward == "inputs":
            module.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in module.parameters()):
            raise RequestError(f"no parameter of {name} requires gradients: say backward=inputs, or lora")


def _add_lora(name: str, module: Any, rank: int) -> None:
    from peft import LoraConfig

    known = dict(module.named_parameters())
    dtype = next(parameter.dtype for parameter in known.values())
    try:
        module.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION, init_lora_weights=False))
    except (AttributeError, ValueError) as error:
        raise RequestError(f"no LoRA can be added to {name}, a {type(module).__name__}: {error}", name=name) from None
    for path, parameter in module.named_parameters():
        if path.replace(".base_layer", "") not in known:
            parameter.data = parameter.data.to(dtype)


def with_gradients(footprint: Footprint, differentiated: Mapping[str, DifferentiatedCalls]) -> Footprint:
    """Return `footprint` with the bytes of the gradients that backward passes leave to parameters."""

    def measured(part: Component) -> Component:
        if part.name not in differentiated:
            return part
        return part.model_copy(update={"gradient_bytes": differentiated[part.name].gradient_bytes})

    return footprint.model_copy(update={"components": tuple(map(measured, footprint.components))})


class DifferentiatedCalls:
    """Calls of `part`, each with the backward pass of a mean squared error after it; `forward` makes one.

    Whoever calls `part` calls `forward` from then on. With `keeps`, gradients are kept until the backward pass ends,
    as optimizers need them; otherwise each goes at once, as if to host memory.
    """

    def __init__(self, part: nn.Module, card: SimulatedCard, *, of_inputs: bool, keeps: bool) -> None:
        self._card, self._part, self._call, self._of_inputs = card, part, type(part).__call__, of_inputs
        self.replayer: Callable[..., Any] = self.differentiated
        override_class_members(part, __call__=lambda _, *args, **kwargs: self.forward(*args, **kwargs))
        if not keeps:
            for parameter in self._trained():
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of its parameters."""
        return sum(parameter.nbytes for parameter in self._trained())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.replayer(*args, **kwargs)

    def differentiated(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward; return the output, detached."""
        with torch.set_grad_enabled(True):
            args, kwargs = self._asking(args, kwargs)
            output = self._call(self._part, *args, **kwargs)
            leaves, _ = tree_flatten(output)
            losses = [
                nn.functional.mse_loss(leaf.float(), torch.zeros_like(leaf, dtype=torch.float32))
                for leaf in leaves
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            output = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            leaves.clear()
            try:
                with self._gradients_unknown():
                    torch.autograd.backward(losses)
            except RuntimeError as error:
                kind, told = type(self._part).__name__, " ".join(str(error).split())
                raise RunError(f"{kind} cannot be differentiated: {told}") from error
        for parameter in self._trained():
            parameter.grad = None
        return output

    @contextlib.contextmanager
    def _gradients_unknown(self) -> Iterator[None]:
        """Copies of gradients to host memory are zeros inside: nothing depends on their values."""
        before, self._card.accepts_zeros = self._card.accepts_zeros, lambda _: True
        try:
            yield
        finally:
            self._card.accepts_zeros = before

    def _asking(self, args: Any, kwargs: Any) -> Any:
        """The arguments; with `of_inputs`, the latents, its first floating-point tensor, require gradients."""
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        first = next((place for place in tensors if leaves[place].is_floating_point()), None)
        if self._of_inputs and first is not None:
            leaves[first] = leaves[first].detach().requires_grad_()
        return tree_unflatten(leaves, structure)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._part.parameters() if parameter.requires_grad)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
