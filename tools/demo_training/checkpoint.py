"""Training state on disk: safetensors for the tensors, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save(path: Path, modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors: dict[str, torch.Tensor] = {"step": torch.tensor(step)}
    for name, module in modules.items():
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def load(path: Path, modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> int:
    """Restores `modules` and `optimizer` in place; returns the number of steps done (0 without a file)."""
    if not path.exists():
        return 0
    tensors = load_file(path)
    for name, module in modules.items():
        prefix = f"{name}."
        module.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, field = key.split(".")
            state.setdefault(int(index), {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(tensors["step"])


def save_module(path: Path, module: torch.nn.Module) -> None:
    partial = path.with_suffix(".partial")
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, partial)
    os.replace(partial, path)


def load_module(path: Path, module: torch.nn.Module) -> bool:
    if not path.exists():
        return False
    module.load_state_dict(load_file(path))
    return True


def note(path: Path, facts: Mapping[str, object]) -> None:
    """Appends one JSON line to the training log and prints it."""
    line = json.dumps(facts)
    with path.open("a") as log:
        log.write(line + "\n")
    print(line, flush=True)
