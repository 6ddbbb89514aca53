"""What a rank of a ring computes on a card: attention to some of the keys, and its log-sum-exp."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tightfit.apply.context_parallel.attention import _fused_kernel, _merged, _partial
from tightfit.devices.cuda_support import cuda_count

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

KINDS = [(torch.float32, 64, 2e-5), (torch.float16, 64, 2e-3), (torch.float16, 40, 2e-3), (torch.float32, 6, 2e-5)]


@pytest.mark.parametrize(("dtype", "width", "close"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
def test_shares_of_the_keys_add_up(dtype: torch.dtype, width: int, close: float) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, rows, width, dtype=dtype, device="cuda") for rows in (37, 50, 50))
    expected = F.scaled_dot_product_attention(query, key, value).float()
    parts = [_partial(query, key[:, :, rows], value[:, :, rows], None) for rows in (slice(0, 23), slice(23, 50))]
    found, total = _merged(*parts)
    assert total.shape == (1, 4, 37, 1)
    assert (found - expected).abs().max() <= close * expected.abs().max()


def test_usual_heads_have_a_fused_kernel() -> None:
    query = torch.empty(1, 4, 16, 64, dtype=torch.float16, device="cuda")
    assert _fused_kernel(query, query, query) in ("flash", "efficient")
    odd = query[..., :6]
    assert _fused_kernel(odd, odd, odd) is None
