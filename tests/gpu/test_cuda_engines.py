"""Where the workspace of one of cuDNN's engines does not fit, torch takes another: so do convolutions here."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional as F

from tightfit.devices.cuda_support import cuda_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "stub_get"), reason="a card's workspaces are its own"),
]


def test_a_workspace_that_does_not_fit_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDNN_WORKSPACE", str(2**44))
    maps, weights = torch.rand(1, 3, 31, 37), torch.rand(5, 3, 3, 3)
    found = F.conv2d(maps.cuda(), weights.cuda())
    torch.testing.assert_close(found.cpu(), F.conv2d(maps, weights))
