"""The rates that cards of the catalog are said to reach, beside published ones; and the table of published times."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tightfit.catalog.clock import UNCERTAINTY, Clock, host_rates, rates, seconds_range
from tightfit.catalog.known import card_facts, card_names, known_card

BENCH = Path(__file__).parents[2] / "bench"
# TFLOP/s of large products in half precision, sustained and in short runs: record 0081
PRODUCTS = {
    "v100": (80, 105), "t4": (20, 42), "a100-80gb": (190, 270), "a10": (52, 70), "rtx-a6000": (105, 135),
    "rtx-a5000": (60, 95), "rtx3090": (66, 77), "rtx3060": (22, 28), "rtx4090": (150, 180), "rtx4060ti": (39, 48),
    "l4": (50, 72), "l20": (100, 115), "l40s": (170, 280), "h100": (560, 820), "h100-pcie": (280, 500),
    "h20": (120, 150), "rtx5090": (175, 242), "rtx5080": (95, 122), "rtx2080ti": (45, 60), "p100": (7, 9.5),
}  # fmt: skip
# TFLOP/s of FlashAttention-2 forward by (scores of a) head dimension
ATTENTION = {("a100-80gb", 128): (170, 230), ("h100", 128): (320, 375), ("h100", 64): (280, 330),
             ("rtx4090", 128): (155, 180), ("h20", 128): (78, 95), ("rtx-a5000", 64): (70, 90)}  # fmt: skip


@pytest.mark.parametrize("card", PRODUCTS)
def test_products_are_as_fast_as_published(card: str) -> None:
    low, high = PRODUCTS[card]
    found = known_card(card).arithmetic_rate("matmul", "float16")
    assert found is not None
    assert low * 0.95e12 <= found <= high * 1.05e12


@pytest.mark.parametrize(("card", "head"), ATTENTION)
def test_attention_is_as_fast_as_published(card: str, head: int) -> None:
    device = known_card(card)
    rate = device.arithmetic_rate("attention", "float16")
    assert rate is not None
    assert device.clock is not None
    assert device.multiprocessors is not None
    a_score = 4 * head / rate + 1 / (16 * device.multiprocessors * device.clock)
    low, high = ATTENTION[card, head]
    assert low * 0.95 <= 4 * head / a_score / 1e12 <= high * 1.05


@pytest.mark.parametrize("card", card_names())
def test_no_rate_is_above_the_nominal_one_of_a_card_that_runs_faster_than_said(card: str) -> None:
    nominal, found = card_facts(card)["arithmetic_rates"], rates(card_facts(card))
    for key, rate in found["arithmetic_rates"].items():
        kind, _, dtype = key.partition(".")
        most = nominal.get("tensorfloat32", 0) if dtype == "float32" and kind != "matmul" else 0
        assert 0 < rate <= Clock().boost * max(nominal[dtype], most)
    assert found["memory_rate"] < card_facts(card)["memory_rate"] <= 5 * found["cache_rate"]


@pytest.mark.parametrize("card", [card for card in card_names() if float(card_facts(card)["compute_capability"]) >= 8])
def test_convolutions_in_single_precision_run_in_tensorfloat32(card: str) -> None:
    device = known_card(card)
    single, half = (device.arithmetic_rate("convolution", dtype) for dtype in ("float32", "float16"))
    assert single is not None
    assert half is not None
    assert 0.4 * half < single < 0.6 * half


def test_a_watt_more_is_never_slower() -> None:
    facts = dict(card_facts("l4"))
    now = rates(facts)["arithmetic_rates"]
    more = rates(facts | {"watts": 150})["arithmetic_rates"]
    assert all(more[key] >= now[key] for key in now)
    assert more["matmul.float16"] > now["matmul.float16"]


def test_the_host_s_part_grows_with_its_factor() -> None:
    slow, fast = host_rates(Clock(host=2.0)), host_rates(Clock(host=1.0))
    assert slow["module_overhead"] == 2 * fast["module_overhead"]
    assert fast["launch_overhead"] < slow["launch_overhead"] < 2 * fast["launch_overhead"]


def found_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((BENCH / "results" / "clock.json").read_text())["rows"]
    return rows


def test_the_listed_times_are_met() -> None:
    errors = [abs(row["error"]) for row in found_rows() if row.get("listed")]
    assert len(errors) >= 18
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25


def test_nine_of_ten_published_times_are_within_the_range_that_is_printed() -> None:
    errors = [abs(row["error_without_model"]) for row in found_rows() if row.get("fit", True)]
    assert sum(error <= UNCERTAINTY for error in errors) >= 0.9 * len(errors)


def test_hosts_that_were_published_are_within_the_range_of_a_call_that_waits_for_the_host() -> None:
    """Steps of Stable Diffusion 1.5 on an RTX 4090 and an A100, by four authors."""
    waiting = ("rtx4090", "a100", "a100-80gb")
    rows = [row for row in found_rows() if row["model"] == "sd-1.5" and row["card"] in waiting]
    steps = [row for row in rows if row["what"] == "step" and row["height"] == 512 and not row.get("batch")]
    assert len(steps) >= 5
    for row in steps:
        least, most = seconds_range(row["predicted"], row["predicted"])
        assert least <= row["seconds"][0] <= row["seconds"][1] <= most


def test_a_fit_without_a_row_predicts_it() -> None:
    errors = [abs(row["error_without_row"]) for row in found_rows() if row.get("fit", True)]
    assert statistics.median(errors) <= 0.15


def test_every_published_time_says_where_it_is_from() -> None:
    rows = json.loads((BENCH / "published_times.json").read_text())
    assert all(row["source"] and row["seconds"][0] <= row["seconds"][1] for row in rows)
    assert len(found_rows()) == len(rows)


def test_the_table_is_of_this_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    clock = importlib.import_module("clock")
    work = json.loads(clock.WORK.read_text())
    for row in found_rows()[::10]:
        assert clock.predicted(row, work, Clock()) == pytest.approx(row["predicted"], rel=0.01, abs=1e-4)
