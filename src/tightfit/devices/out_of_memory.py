"""Errors that say that a device's memory ran out, by whatever type and words."""

from __future__ import annotations

import re

import torch

__all__ = ["is_out_of_memory"]

# Memory outside of torch's allocator: the driver's, for kernels that are loaded when they are first used, and that of
# cuBLAS and cuDNN. They cannot make their handles without memory either, and say then that they are not initialized.
_SAYS = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"
    r"|\[(CUDA|HIP)\]: out of memory"  # Triton
    r"|(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    r"|API call failed at .*aoti_runner",  # AOTInductor keeps its reason to itself; what it is given was checked
    re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, of a device or by RamExceeded.

    torch.OutOfMemoryError is of torch's allocator alone; all others are RuntimeErrors of other kinds.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS.search(str(error)) is not None
