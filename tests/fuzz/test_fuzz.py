"""Some random inputs, other ones than those of `python -m fuzz`, which has thousands; and those that once failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuzz.__main__ import untouched, verdict

FAILED: tuple[int, ...] = (3087, 3319)  # seeds
FRESH = range(10**6, 10**6 + 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    return folder, untouched(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the commands run in this process's children
@pytest.mark.parametrize("seed", [*FAILED, *FRESH])
def test_every_input_is_a_success_or_one_line(seed: int, model: tuple[Path, np.ndarray[Any, Any]]) -> None:
    row = verdict(seed, *model)
    assert "wrong" not in row, row
