"""An exported network as machine code, compiled on this computer by torch's AOTInductor and cached in a folder.

Weights are not part of it: each call passes those of the live network. Machine code runs unchecked, so it is loaded
only from a folder that no other user may write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.program import ExportedNetwork
from tightfit.devices.choose import choose_device
from tightfit.errors import PlanError, RunError
from tightfit.files import check_regular, replacing

__all__ = ["CompiledProgram"]

Package = Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]


class CompiledProgram:
    """The network `traced`, compiled for each device when it first runs there. For inference only: no gradients.

    Sums are rounded in another order than by the network's own code. `folder` caches the compiled packages; `seconds`
    is the time spent compiling in this process.
    """

    def __init__(self, exported_file: ExportedFile, folder: Path) -> None:
        self._exported_file = exported_file
        self._folder = folder
        self._program = ExportedNetwork(exported_file)
        self._packages: dict[torch.device, Package] = {}
        self.seconds = 0.0

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        weight: Callable[[int], torch.Tensor],
        device: torch.device,
        at: Callable[[int], None] = lambda place: None,
    ) -> list[Any]:
        """Return the outputs on `device`.

        PlanError if a weight is no plain tensor on `device`; RunError if the network cannot be compiled or loaded.
        """
        names = self._exported_file.graph.weights
        weights = [_plain(name, weight(place), device) for place, name in enumerate(names)]
        given = [tensor.detach().to(device) for tensor in inputs]
        if device not in self._packages:
            self._packages[device] = self._package(device, given, weights)
        return list(self._packages[device](given, weights))

    def _package(self, device: torch.device, inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> Package:
        """Load the package from the folder; if missing, compile it and store it there."""
        if device.type not in ("cpu", "cuda"):
            raise PlanError(
                f"an exported denoiser cannot be compiled for {device}: leave compiled out", device=str(device)
            )
        _check_own(self._folder)
        file = self._folder / f"{self._key(device)}.pt2"
        try:
            check_regular(file)
        except OSError as error:
            raise RunError(f"cannot read {file}: {error.strerror}: remove it", path=str(file)) from None
        if not file.exists():
            self._compile(file, device, inputs, weights)
        index = -1 if device.index is None else device.index
        try:
            return torch._inductor.aoti_load_package(str(file), device_index=index)
        except RuntimeError as error:
            file.unlink(missing_ok=True)
            raise RunError(f"{file} could not be loaded and was removed, try again: {error!s:.200}") from error

    def _compile(
        self, file: Path, device: torch.device, inputs: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> None:
        began, program = time.perf_counter(), _Lifted(self._program, device)
        with replacing(file) as partial, partial.open("w+b") as package, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's internal warnings
            try:
                with torch.inference_mode(False), torch.no_grad():
                    exported = torch.export.export(program, (inputs, weights), strict=False)
                    torch._inductor.aoti_compile_and_package(exported, package_path=package)
            except Exception as error:  # a missing or failing compiler, an unsupported operation
                cause = str(error).strip().splitlines() or [type(error).__name__]
                kind = self._exported_file.manifest.class_name
                raise RunError(
                    f"{kind} cannot be compiled here: {cause[0]:.300}: leave compiled out", name=kind
                ) from error
        self.seconds += time.perf_counter() - began

    def _key(self, device: torch.device) -> str:
        """Digest of the exported network and of everything that its machine code depends on."""
        exported_file, card = self._exported_file, choose_device(device)
        digest = hashlib.sha256(exported_file.manifest.to_json().encode())
        digest.update(exported_file.graph.to_json().encode())
        digest.update(save(exported_file.constants))
        facts = (torch.__version__, device.type, card.product_name(), card.compute_capability(), _instructions())
        digest.update(repr((*facts, torch.get_num_threads())).encode())
        return digest.hexdigest()


class _Lifted(nn.Module):
    """A program as a module that takes its weights as an argument."""

    def __init__(self, program: ExportedNetwork, device: torch.device) -> None:
        super().__init__()
        self._program = program
        self._device = device

    def forward(self, inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._program.run(inputs, weights.__getitem__, self._device)


def _plain(name: str, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    plain = weight.detach()
    if type(plain) is torch.Tensor and plain.device == device:
        return plain
    there = f"on {plain.device}" if type(plain) is torch.Tensor else f"a {type(plain).__name__}"
    raise PlanError(
        f"{name} is {there}, and compiled code takes weights as loaded, on {device}: placement=offload or resident "
        "and storage=as-loaded would do, or leave compiled out",
        name=name,
    )


def _check_own(folder: Path) -> None:
    """Create `folder` for this user only. RunError if others may write to it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, mode=0o700)
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise RunError(f"{folder} may be written to by others, and machine code is taken from there: chmod 700 it")


def _instructions() -> str:
    """This processor's instruction sets: compiled code may use all of them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = (line for line in lines if line.startswith(("flags", "Features")))
    return f"{platform.machine()} {next(features, platform.processor())}"
