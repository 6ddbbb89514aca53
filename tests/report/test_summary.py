"""The report of one call: text, JSON and a log line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tightfit.report.summary import Report, fold_phases
from tightfit.schema.machine import Budget
from tightfit.schema.plan import ComponentPlan, Plan, Reason
from tightfit.schema.results import PhaseTrace, Sample, Trace

MIB = 2**20
ENCODE = PhaseTrace(
    name="encode", start=0, seconds=0.02, peak_bytes=100 * MIB, peak_weights=90 * MIB, bytes_in=90 * MIB
)
DENOISE = PhaseTrace(name="denoise", start=0.02, seconds=5, peak_bytes=300 * MIB, peak_weights=200 * MIB, runs=20)
DECODE = PhaseTrace(name="decode", start=5.02, seconds=0.2, peak_bytes=400 * MIB, bytes_out=3 * MIB)


def report_of(plan: Plan | None = None, **fields: Any) -> Report:
    given: dict[str, Any] = {
        "seconds": 5.25,
        "phases": (ENCODE, DENOISE, DECODE),
        "device": "cuda:0",
        "rss_peak_bytes": 800 * MIB,
    }
    return Report(plan or Plan(device="cuda:0", level=2), Trace(**given | fields))


def budgeted(**budget: int) -> Plan:
    return Plan(level=2, budget=Budget(**budget))


def test_text_opens_with_the_headline() -> None:
    assert str(report_of(call=3)).splitlines()[0] == "call 3 on cuda:0: 5.25 s, peak 400 MiB, RAM peak 800 MiB"


def test_text_leaves_out_an_rss_that_was_not_measured() -> None:
    assert "RAM" not in str(report_of(rss_peak_bytes=0))


def test_text_has_one_aligned_row_per_phase() -> None:
    header, *rows = str(report_of()).splitlines()[2:6]
    assert [row.split()[0] for row in rows] == ["encode", "denoise", "decode"]
    assert rows[1].split() == ["denoise", "5", "s", "20", "300", "MiB", "200", "MiB", "0", "B", "0", "B"]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_text_without_phases() -> None:
    assert "no phase was measured" in str(report_of(phases=()))


def test_text_adds_up_components_that_take_turns() -> None:
    text = str(report_of(phases=(DENOISE, DECODE) * 20))
    assert len([line for line in text.splitlines() if line.startswith("  denoise")]) == 1
    assert "400" in text.split("denoise")[1].splitlines()[0]  # 20 stretches of 20 passes
    assert "(40 phases, added up by name)" in text


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        ({"device": 500 * MIB}, "device budget: 400 MiB of 500 MiB, within, 100 MiB to spare"),
        ({"device": 400 * MIB}, "device budget: 400 MiB of 400 MiB, within, 0 B to spare"),
        ({"device": 300 * MIB}, "device budget: 400 MiB of 300 MiB, over by 100 MiB"),
        ({"ram": 700 * MIB}, "RAM budget: 800 MiB of 700 MiB, over by 100 MiB"),
    ],
)
def test_text_holds_the_peak_against_the_budget(budget: dict[str, int], line: str) -> None:
    assert line in str(report_of(budgeted(**budget))).splitlines()


def test_text_has_no_budget_line_without_a_budget() -> None:
    assert "budget" not in str(report_of())


def test_lossy_is_what_happened_not_what_was_allowed() -> None:
    allowed = Plan(components={"transformer": ComponentPlan(storage="float8_e4m3fn")})
    idle, used = report_of(allowed), report_of(allowed, lossy=("fp8",))
    assert idle.lossless
    assert "lossless: what the plan allows changed nothing" in str(idle)
    assert not used.lossless
    assert "lossy: fp8 (weights stored in eight bits, widened for each use)" in str(used)
    assert "\nlossless" in str(report_of())


def test_text_ends_with_notes_and_reasons_each_on_one_line() -> None:
    plan = Plan(reasons=(Reason(decision="vae whole", because="it fits"),))
    text = str(report_of(plan, notes=("out of memory\nin block 3",)))
    assert text.splitlines()[-2:] == ["note: out of memory in block 3", "because: vae whole: it fits"]


def test_mapping_survives_json() -> None:
    report = report_of(budgeted(device=500 * MIB), lossy=("fp8",), notes=("a note",))
    mapping = json.loads(json.dumps(report.to_mapping()))
    assert set(mapping) == {"lossless", "measured", "phases", "caches", "lossy", "notes", "plan"}
    assert mapping["measured"] == {"peak_bytes": 400 * MIB, "seconds": 5.25, "rss_peak_bytes": 800 * MIB}
    assert mapping["phases"][1] == {
        "name": "denoise", "measured_peak_bytes": 300 * MIB, "seconds": 5, "other_devices": {}, "bytes_in": 0,
        "bytes_out": 0, "runs": 20,
    }  # fmt: skip
    assert (mapping["lossless"], mapping["lossy"], mapping["notes"]) == (False, ["fp8"], ["a note"])
    assert mapping["caches"] == []
    assert Plan.from_mapping(mapping["plan"]) == report.plan


def test_log_line() -> None:
    assert report_of().log_line() == (
        f"call=1 device=cuda:0 level=2 seconds=5.25 peak_bytes={400 * MIB} rss_peak_bytes={800 * MIB} "
        "lossless=true slowest_phase=denoise"
    )


def test_log_line_quotes_and_names_what_is_not_there() -> None:
    odd = PhaseTrace(name='two words\n"x"=1', start=0, seconds=9, peak_bytes=0)
    line = report_of(Plan(), phases=(odd,)).log_line()
    assert "level=custom" in line
    assert line.endswith(r'slowest_phase="two words\n\"x\"=1"')
    assert report_of(phases=()).log_line().endswith("slowest_phase=none")


def test_fold_adds_up_and_keeps_the_highest_peak() -> None:
    higher = PhaseTrace(name="denoise", start=9, seconds=1, peak_bytes=350 * MIB, peak_weights=10 * MIB, bytes_in=7)
    first, second = fold_phases((DENOISE, DECODE, higher))
    assert (first.seconds, first.runs, first.bytes_in) == (6, 21, 7)
    assert (first.peak_bytes, first.peak_weights) == (350 * MIB, 10 * MIB)
    assert second == DECODE


def test_repr_is_one_line_whatever_the_trace_holds() -> None:
    samples = tuple(Sample(seconds=moment, weights=1, activations=1) for moment in range(1000))
    assert repr(report_of(samples=samples)) == "<Report of call 1 on cuda:0: 5.25 s, peak 400 MiB>"
