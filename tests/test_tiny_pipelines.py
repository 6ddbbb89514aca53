"""The tiny pipelines are fit to test with: repeatable, finite, and saying something."""

import pytest
import torch

from tiny_pipelines import CASES, TinyCase, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_is_repeatable_finite_and_varied(case: TinyCase) -> None:
    first, second = (run(case.make(), case) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0
