"""Every autoencoder that diffusers has, in strips of any number: exact, and docs/exact-tiling.md says what is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import tightfit.apply.activations
from half_precision import FARTHER
from strip_proof import PAGE, ROUNDING, TINY, prove, rows_of
from tiny_autoencoders import OPTIONAL_PARTS, TinyAutoencoder

# one of them looks at neighbourhoods by flex attention, which has no compiled kernel here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_strips_are_exact_and_the_page_says_what_was_found(case: TinyAutoencoder) -> None:
    lines = rows_of(PAGE.read_text())
    for found in prove(case):
        assert found.error <= (0 if found.why_not_split else ROUNDING), found
        assert not [dtype for dtype, farther in found.farther.items() if farther > FARTHER], found
        assert found.row in lines, f'run: python tests/strip_proof.py "{case.name}"'


def test_the_page_has_a_line_for_every_method_of_every_class() -> None:
    page = PAGE.read_text()
    lines = [tuple(row.strip("| ").split(" | ")[:2]) for row in rows_of(page)]
    assert lines == [(case.name, method) for case in TINY for method in ("decode", "encode")[: 1 + case.encodes]]
    assert all(f"`{name}`" in page for name in OPTIONAL_PARTS)


def test_no_class_is_named_where_activations_are_worked_on() -> None:
    names = {case.name.partition(" ")[0] for case in TINY} | set(OPTIONAL_PARTS)
    folder = Path(tightfit.apply.activations.__file__).parent
    sources = {file: file.read_text() for file in folder.rglob("*.py")}
    assert len(sources) > 30
    assert not [(file.name, name) for file, source in sources.items() for name in names if name in source]
