"""Memory that runs out says so in many ways."""

from __future__ import annotations

import pytest
import torch

from tightfit.apply.weights.oom_retry import retry_on_oom
from tightfit.devices.memory import RamExceeded, is_out_of_memory

# word for word from reports of users
SAYINGS = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Triton Error [CUDA]: out of memory",
    "HIP error: out of memory",
    "run_func_( container_handle_, input_handles.data(), input_handles.size()) API call failed at "
    "/pytorch/torch/csrc/inductor/aoti_runner/model_container_runner.cpp, line 145",
]
OTHERS = ["CUDA error: an illegal memory access was encountered", "CUDA driver error: unknown error", "out of range"]


@pytest.mark.parametrize("said", SAYINGS)
def test_what_is_out_of_memory(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))
    assert is_out_of_memory(torch.AcceleratorError(said))
    assert not is_out_of_memory(ValueError(said))


@pytest.mark.parametrize("said", OTHERS)
def test_what_is_not(said: str) -> None:
    assert not is_out_of_memory(RuntimeError(said))


def test_torchs_own_and_ours() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("whatever it says"))
    assert is_out_of_memory(RamExceeded(5))


@pytest.mark.parametrize("said", SAYINGS)
def test_a_block_that_ran_out_of_it_runs_again(said: str) -> None:
    failures, sheds = [said, said, said], [True, True]

    def block(x: torch.Tensor) -> torch.Tensor:
        if failures:
            raise RuntimeError(failures.pop())
        return x + 1

    assert retry_on_oom(block, lambda: sheds.pop(0))(torch.ones(1)).item() == 2
    assert not sheds  # the first time, what the allocator kept was tried


def test_what_never_helps_is_raised_as_it_was() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        raise RuntimeError(SAYINGS[0])

    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        retry_on_oom(block, lambda: False)(torch.ones(1))
    assert len(calls) == 2


def test_other_errors_are_not_tried_again() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        raise RuntimeError(OTHERS[0])

    with pytest.raises(RuntimeError, match="illegal memory access"):
        retry_on_oom(block, lambda: True)(torch.ones(1))
    assert len(calls) == 1
