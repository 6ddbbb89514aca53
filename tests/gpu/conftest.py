"""What tests on a card share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_kernels() -> Iterator[None]:
    """Float32 is float32, and a convolution is done by the same algorithm each time.

    Otherwise convolutions round to TF32 from Ampere on, and cuDNN may choose an algorithm whose sums come in any
    order. How bits depend on shapes remains: cuDNN chooses by them.
    """
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = matmul
