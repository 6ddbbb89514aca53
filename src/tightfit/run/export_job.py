"""A model → its exported denoiser, without loading weights: the work of `tightfit export`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tightfit.apply.activations.export_denoiser import export_module, find_denoiser, first_call
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.devices.choose import choose_device
from tightfit.errors import InputError, unknown_name
from tightfit.run.files import check_writable
from tightfit.run.models import DTYPES, find_model, stored_dtype
from tightfit.run.plan_options import demo_request
from tightfit.run.simulate import SimulationRun, unlimited_card
from tightfit.schema.footprint import Request
from tightfit.schema.machine import Accelerator

__all__ = ["export_model"]

_CARD = Accelerator(name="any card", kind="simulated", bytes=1)  # shapes do not depend on the card's bytes and rates


def export_model(
    model: str | None,
    out: Path,
    asked: Request | None = None,
    *,
    name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> ExportedFile:
    """Export the denoiser of `model` (folder or hub id; None: the demo model) for the request `asked` to `out`.

    Only configurations are read. Fields that `asked` leaves open have the pipeline's defaults; `inputs` are further
    arguments of its call, by name: a negative prompt, or the prompt if its length in tokens matters. `dtype` is the
    compute dtype (default: that of `tightfit run` on `device`: float32 on the CPU, else as stored). `name` selects one
    of several denoisers.

    Raises InputError for an unknown device or dtype and a path that cannot be written, ModelError for what cannot be
    loaded or exported, RequestError for what the pipeline does not accept, PlanError for an unknown `name`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(unknown_name("dtype", dtype, DTYPES), dtype=dtype)
    on_cpu = choose_device(device).torch_device.type == "cpu"
    check_writable(out)
    folder = find_model(model)
    request = asked or Request()
    if model is None:
        request = demo_request(request)
    usual = "float32" if on_cpu else stored_dtype(folder.components)
    exported_file = _export(folder, getattr(torch, dtype or usual), request, name, inputs)
    exported_file.save(out)
    return exported_file


def _export(
    folder: ModelFolder, dtype: torch.dtype, request: Request, name: str | None, inputs: Mapping[str, Any] | None
) -> ExportedFile:
    """Simulate a call to get the denoiser's inputs, then export it with these."""
    pipe = build_folder(folder, dtype)
    module = find_denoiser(pipe, name)
    with unlimited_card(_CARD) as card:
        stage = SimulationRun(pipe, card, {"level": 0}, request)
        given = first_call(module, lambda: stage.run(inputs))
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), given)
        del given
        stage.fitted.undo()
        del module.forward  # set by the simulation
    return export_module(module, *args, **kwargs)
