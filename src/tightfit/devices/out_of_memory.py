"""Recognizes errors that mean that a device is out of memory, by type and message."""

from __future__ import annotations

import re

import torch

__all__ = ["is_out_of_memory"]

# Memory outside of torch's allocator: the driver's, for kernels that are loaded on first use, and that of cuBLAS and
# cuDNN. They cannot create their handles without memory either, and then report that they are not initialized.
_SAYS = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"
    r"|\[(CUDA|HIP)\]: out of memory"  # Triton
    r"|(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    r"|API call failed at .*aoti_runner",  # AOTInductor does not report its reason; its inputs were checked before
    re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a device is out of memory, or is a RamExceeded.

    torch.OutOfMemoryError is raised by torch's allocator only; all others are RuntimeErrors, recognized by message.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS.search(str(error)) is not None
