"""A tiny pipeline that follows a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit import Fitted, fit
from tiny_pipelines import CASES


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES[0].make()


@pytest.fixture(scope="module")
def fitted(pipe: Any) -> Fitted:
    return fit(pipe, level=0, device="cpu")
