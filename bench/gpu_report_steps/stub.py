"""What differs on the stub's card (tests/cuda_stub), where DRY=1 runs: settings, and pipelines without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from cuda_stub import driver
from measuring import fill_at_random
from tightfit.catalog.known import known_model
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components

__all__ = ["computing_if_stub", "settings", "small_values_if_stub", "weighted"]

# the last: or whoever asks for cards while being imported opens one, and processes forked from there could not
_COMMON = {"STUB_CARDS": "1", "STUB_CUDNN_WORKSPACE": "copies", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_WITHOUT_VALUES = {"STUB_COPY": "0", "STUB_COPY_MAX": "65536", "STUB_RACES": "0", "STUB_TOTAL": "24G"}
_WITH_VALUES = {"STUB_COPY": "1", "STUB_RACES": "1", "STUB_TOTAL": "6G"}


def settings(values: bool) -> dict[str, str]:
    """Variables of a step's process; a real card ignores them."""
    return _COMMON | (_WITH_VALUES if values else _WITHOUT_VALUES)


def weighted(model: str) -> Any:
    """The known model `model` at full size, in RAM: with random weights; on the stub with memory nobody touches."""
    pipe = build_known(known_model(model))
    pipe.set_progress_bar_config(disable=True)
    if driver.loaded():
        from peaks_cuda import give_weights, without_numbers

        without_numbers()
    for network in find_components(pipe).values():
        give_weights(network) if driver.loaded() else fill_at_random(network)
    return pipe


@contextlib.contextmanager
def small_values_if_stub() -> Iterator[None]:
    """On the stub: small tensors, which pipelines look at, are computed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if driver.loaded():
            from cuda_stub.compute import Compute
            from peaks_cuda import SMALL, SMALL_WHOLE

            stack.enter_context(Compute(most=SMALL, most_whole=SMALL_WHOLE))
        yield


@contextlib.contextmanager
def computing_if_stub() -> Iterator[None]:
    """On the stub: all tensors are computed, except while rates are measured."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if driver.loaded():
            from cuda_stub.compute import computing
            from cuda_stub.plugin import rates_without_numbers

            stack.enter_context(computing())
            stack.enter_context(rates_without_numbers())
        yield
