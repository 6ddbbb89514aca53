"""What tests of `tightfit shard` have in common: how it is called, and when two models are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from tightfit import cli

__all__ = ["assert_same", "complaint", "content", "names", "shard", "weights"]


def shard(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["shard", *map(str, words)])


def complaint(*words: object, code: int = 2) -> str:
    """The one line that the command has against what it is given."""
    result = shard(*words)
    assert result.exit_code == code, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    networks = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, part in networks.items() for key, value in part.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
