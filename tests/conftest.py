"""What several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny_pipelines import CASES

# transformers swaps torch.linspace while it loads, and torch would remember that one for `with torch.device`
torch.utils._device._device_constructors()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read of the user's cache, and nothing added to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Stable Diffusion: 64 × 64 pixels, whose sides must be multiples of 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    CASES[0].make().save_pretrained(folder, safe_serialization=True)
    return folder
