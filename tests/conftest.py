"""What several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_pipelines import CASES


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Stable Diffusion: 64 × 64 pixels, whose sides must be multiples of 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    CASES[0].make().save_pretrained(folder, safe_serialization=True)
    return folder
