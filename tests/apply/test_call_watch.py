"""Which backends of a process group are NCCL's: a call is watched over where ranks use one of these."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tightfit.apply.context_parallel.call_watch import nccl_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.mark.parametrize(
    ("name", "devices", "is_nccl"),
    [("ProcessGroupNCCL", ["cpu", "cuda"], True), ("ProcessGroupNCCL2", ["cpu", "cuda"], True),  # from torch 2.15 on
     ("ProcessGroupGloo", ["cpu", "cuda"], False), ("ProcessGroupGloo", ["cpu"], False)],
)  # fmt: skip
def test_backends_of_cards(name: str, devices: list[str], is_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = type(name, (), {})()

    class Group:
        def __init__(self) -> None:
            self._device_types = [torch.device(device) for device in devices]

        def _get_backend(self, device: torch.device) -> object:
            assert device in self._device_types
            return backend

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl_of(Group()) is (backend if is_nccl else None)  # type: ignore[arg-type]
