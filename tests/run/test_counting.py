"""`tightfit plan` where RAM is short: weights come from the disk, and what that means is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tightfit
from tightfit.cli import app
from tightfit.run.count import needs_store_rates
from tightfit.run.limits import limits_of
from tightfit.run.predict import forecast

pytestmark = pytest.mark.usefixtures("shared_footprints")


def told(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "sd-1.5", "--height", "256", "--width", "256", *words, "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_less_ram_is_slower_on_a_card_and_keeps_within_both() -> None:
    plenty = told("--card", "rtx3060", "--budget", "1GB")
    short = told("--card", "rtx3060", "--budget", "1GB", "--ram", "800MB")
    stores = {part["offload_to"] for part in short["plan"]["components"].values() if part["placement"] != "resident"}
    assert "disk" in stores
    assert short["fits"]
    assert short["predicted"]["peak_reserved_bytes"] <= 10**9
    assert short["predicted"]["seconds"] > plenty["predicted"]["seconds"]


@pytest.mark.slow
def test_on_this_computers_processor() -> None:
    """Budgets below the weights' bytes stream from the disk; what this process holds is taken already."""
    short = told("--ram", "1.7GB")
    assert short["fits"]
    assert any(part["offload_to"] == "disk" for part in short["plan"]["components"].values())
    assert short["predicted"]["peak_reserved_bytes"] <= short["capacity_bytes"] < 1.7e9


@pytest.mark.slow
def test_fields_that_somebody_chose() -> None:
    changes = ("components.unet.offload_to=disk", "components.unet.placement=stream")
    chosen = told("--card", "rtx3060", *(word for change in changes for word in ("--set", change)))
    assert chosen["plan"]["components"]["unet"]["offload_to"] == "disk"
    assert chosen["phases"][1]["predicted_peak_weights"] < 10**9  # of 1.7 GB
    assert chosen["phases"][1]["runs"] > 1


def test_what_stays_is_not_read_again() -> None:
    assert needs_store_rates({"components": {"unet": {"offload_to": "disk", "placement": "offload"}}})
    assert not needs_store_rates({"components": {"unet": {"offload_to": "disk"}}})
    assert not needs_store_rates({"level": 3})


QUESTION = ("plan", "sd-1.5", "--card", "rtx3060", "--height", "256", "--width", "256")
WITHOUT_TORCH = f"""
import sys
from tightfit.cli import app
for size in ("900MB", "2GB"):
    try:
        app([*{QUESTION!r}, "--budget", size])
    except SystemExit as end:
        assert not end.code
assert "torch" not in sys.modules and "diffusers" not in sys.modules
"""


def test_another_budget_of_what_is_known_needs_no_torch(shared_footprints: Path) -> None:
    """Its figures are those of the plan; a timeline is still simulated."""
    tightfit.measure_footprint("sd-1.5", {"height": 256, "width": 256})
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("computed without simulating the call") == 2


def test_nor_is_a_first_plan_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulating the call under its plan takes longer than planning; a level without a budget is simulated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    simulated = list[str]()
    monkeypatch.setattr("tightfit.run.simulate.simulate_call", lambda model, *_, **__: simulated.append(model))
    asked, limits = tightfit.Request(height=256, width=256), limits_of("1GB", None, [], {})
    found = forecast("sd-1.5", "rtx3060", {}, asked, lambda what: nullcontext(), limits)
    assert found.fits
    assert not simulated
    with pytest.raises(AttributeError):
        forecast("sd-1.5", "rtx3060", {"level": 3}, asked, lambda what: nullcontext())
    assert simulated == ["sd-1.5"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("card", "budget"), [("rtx3060", "1GB"), ("a100", "1.8GB"), ("a100", "8GB")])
def test_what_is_counted_is_what_a_rehearsal_shows(card: str, budget: str, shared_footprints: Path) -> None:
    asked, limits = tightfit.Request(height=256, width=256), limits_of(budget, None, [], {})
    tightfit.measure_footprint("sd-1.5", asked)
    quick, played = (
        forecast("sd-1.5", card, {}, asked, lambda what: nullcontext(), limits, simulated=simulated)
        for simulated in (False, True)
    )
    assert quick.trace.notes
    assert not played.trace.notes
    assert quick.plan.components == played.plan.components
    for one, other in zip(quick.trace.phases, played.trace.phases, strict=True):
        assert one.name == other.name
        assert one.peak_reserved is not None
        assert other.peak_bytes <= one.peak_reserved  # an allocator reserves no more where it may have no more
    assert quick.trace.seconds == pytest.approx(played.trace.seconds, rel=0.01)
    assert quick.host_seconds == pytest.approx(played.host_seconds, abs=0.02 * played.trace.seconds)
    assert (sum(quick.host_seconds.values()) > 0.9 * quick.trace.seconds) is (card == "a100")
