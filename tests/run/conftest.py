"""A tiny pipeline that follows a plan, and footprints that several tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.conftest import make_cards  # noqa: F401  another folder's fixture
from tightfit import Fitted, fit
from tightfit.simulator.backend import use_cards
from tiny_pipelines import CASES


@pytest.fixture
def shared_footprints(new_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, but for footprints, which all tests share that ask for it; and no cards afterwards."""
    cache = new_cache("footprints")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield cache
    use_cards([])


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES[0].make()


@pytest.fixture(scope="module")
def fitted(pipe: Any) -> Fitted:
    return fit(pipe, level=0, device="cpu")
