"""The README is short, and the documentation says what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import make_command_line
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.plan import ComponentPlan, ComponentRun, Plan, VaePlan

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 500


def words_of(text: str) -> list[str]:
    """Words of prose and tables, without code blocks, comments and link targets."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"[^\s|#*`\[\]!-]+", text)


def test_the_readme_is_short() -> None:
    assert len(words_of((ROOT / "README.md").read_text())) <= MOST_WORDS


def test_the_command_line_page_is_what_help_says() -> None:
    assert make_command_line.PAGE.read_text() == make_command_line.page(), "run tools/make_command_line.py"


@pytest.mark.parametrize("kind", [Plan, ComponentPlan, VaePlan, ComponentRun, DeviceMap])
def test_every_plan_field_is_explained(kind: type[Plan]) -> None:
    page = (ROOT / "docs/plan-fields.md").read_text()
    assert not [name for name in kind.model_fields if f"`{name}`" not in page]


def test_the_recipe_for_a_weight_store_has_the_one_that_is_tested() -> None:
    tested = (ROOT / "tests/apply/test_third_store.py").read_text()
    example = tested[tested.index("class CompressedStore") : tested.index("@pytest.fixture")].strip()
    assert f"```python\n{example}\n```" in (ROOT / "docs/recipes/add-a-weight-store.md").read_text()


def test_every_page_is_in_the_navigation_once() -> None:
    found = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(found) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def test_nothing_is_loaded_from_outside() -> None:
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["font"] is False


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "links"], ids=lambda page: page.stem)
def test_links_to_other_sites_are_on_one_page(page: Path) -> None:
    assert not re.findall(r"\]\(https?://[^)]*\)", page.read_text())


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: no {target}"
