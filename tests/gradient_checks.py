"""Gradients of a pipeline's denoiser, and a training loop: for tests that compare them with the untouched network's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from inspection import relative_error
from more_pipelines import MORE_CASES
from tightfit.measure.modules import find_components, find_role
from tiny_pipelines import CASES, run

EVERY = (*CASES, *MORE_CASES)
CLOSE = 1e-6  # of the largest value
PLANS: Mapping[str, dict[str, Any]] = {
    "layers": {"placement": "stream", "granularity": "layer"},
    "blocks": {"placement": "stream", "granularity": "block", "gradient_checkpointing": True},
    "kept": {"placement": "stream", "gradient_checkpointing": False},
    "offload": {"placement": "offload"},
    "disk": {"placement": "stream", "offload_to": "disk"},
    "resident": {"placement": "resident", "gradient_checkpointing": True},
}


class _Captured(Exception):
    pass


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@functools.lru_cache(maxsize=2)
def denoiser_call(name: str) -> Call:
    """The denoiser of a pipeline, and the arguments of its first call."""
    case = next(case for case in EVERY if case.name == name)
    pipe = case.make()
    seen: list[Call] = []

    def capture(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((module, *tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (args, kwargs))))
        raise _Captured

    hooks = [
        module.register_forward_pre_hook(capture, with_kwargs=True)
        for part, module in find_components(pipe).items()
        if find_role(part, module) == "denoiser"
    ]
    with pytest.raises(_Captured):
        run(pipe, case)
    for hook in hooks:
        hook.remove()
    network, args, kwargs = seen[0]
    if name.startswith("CogVideoX"):  # in float32 diffusers changes in place what torch has saved
        half = tree_map(_halved, (args, kwargs))
        return network.to(torch.bfloat16), *half
    return network, args, kwargs


def _halved(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.bfloat16() if is_float else value


Gradients = dict[str, torch.Tensor]


def gradients(call: Any, args: Any, kwargs: Any, device: str = "cpu", of: nn.Module | None = None) -> Gradients:
    """Gradients of all inputs and parameters (of `of`, or the network that is called), of one pass forward and back."""
    network = of or call

    def asking(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.clone().requires_grad_()
        return value

    inputs = tree_map(asking, (args, kwargs))
    there = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
    outputs = tree_leaves(call(*there[0], **there[1], **({} if "return_dict" in kwargs else {"return_dict": False})))
    loss = sum(output.float().square().mean() for output in outputs if isinstance(output, torch.Tensor))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    of_inputs = {str(place): value.grad for place, value in enumerate(tree_leaves(inputs)) if _has(value)}
    of_parameters = {name: parameter.grad for name, parameter in network.named_parameters() if _has(parameter)}
    network.zero_grad(set_to_none=True)
    return of_inputs | of_parameters


def _has(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad is not None


def assert_close(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    wrong = {name: relative_error(found[name].cpu(), gradient) for name, gradient in wanted.items() if gradient.any()}
    worst = max(wrong, key=lambda name: wrong[name])
    assert wrong[worst] <= CLOSE, worst


def with_lora(network: Any) -> Any:
    torch.manual_seed(1)
    network.requires_grad_(False)
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def trained(network: Any, call: Call, parameters: list[nn.Parameter], steps: int = 4) -> list[float]:
    """Losses of an ordinary training loop."""
    _, args, kwargs = call
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(steps):
        output = network(*args, **kwargs)[0]
        loss = (output.float() - torch.randn(output.shape, generator=generator).to(output.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
