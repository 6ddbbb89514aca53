"""A tiny pipeline that follows a plan, and footprints that several tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit import Fitted, fit
from tightfit.pretend.backend import use_cards
from tiny_pipelines import CASES


@pytest.fixture
def shared_footprints(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that all tests share which ask for it, whichever process they run in; and no cards afterwards."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "footprints"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    use_cards([])


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES[0].make()


@pytest.fixture(scope="module")
def fitted(pipe: Any) -> Fitted:
    return fit(pipe, level=0, device="cpu")
