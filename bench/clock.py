"""Published times of eager PyTorch beside those that the clock predicts, and the fit of its parameters.

    python bench/clock.py work     kernels of each published call, measured once, in bench/results/clock-work.json
    python bench/clock.py fit      the parameters, fitted anew: to be copied into tightfit/catalog/clock.py
    python bench/clock.py table    bench/results/clock.json, with each row predicted by fits without it too

Rows are those of bench/published_times.json. A time is that of a call at level 0: of all of it, of its steps, of one
step, of one pass of the denoiser, of the decode, or of what is not in its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import RESULTS, write
from tightfit.catalog import clock as catalog_clock
from tightfit.catalog.clock import Clock
from tightfit.catalog.known import card_facts, known_model
from tightfit.measure.build_models import build_known
from tightfit.run.footprints import measure_footprint
from tightfit.schema.footprint import Footprint
from tightfit.schema.kernel_time import kernel_seconds
from tightfit.schema.machine import Accelerator, Amounts
from tightfit.schema.request import Request

ROWS = Path(__file__).with_name("published_times.json")
WORK = RESULTS / "clock-work.json"
SPREAD = 0.08  # of published times of the same call, as a standard deviation of the logarithm
# fitted parameters of Clock: what was guessed before any fit, and the standard deviation of the logarithm around that.
# Every fit begins there, so that one without a row knows nothing of it.
FITTED = {
    "convolution_feed": (4000.0, 0.7), "early_share": (0.5, 0.5), "tail": (0.25, 0.7),
    "cache": (12.0, 0.7), "boost": (1.05, 0.06), "host": (1.6, 0.2),
}  # fmt: skip

Row = dict[str, Any]
Group = tuple[str, str, int, int, tuple[int, ...]]  # kind, dtype, kernels, module calls, amounts


def rows() -> list[Row]:
    found: list[Row] = json.loads(ROWS.read_text())
    return found


def key_of(row: Row) -> str:
    """What the work of a row depends on."""
    parts = (row["model"], row["height"], row["width"], row.get("frames"), row.get("batch", 1), row.get("guidance"))
    return " ".join(str(part) for part in (*parts, row.get("variant", "")))


# work


def pipeline(row: Row) -> Any:
    """The pipeline without weights, in the variant that was published."""
    pipe = build_known(known_model(row["model"]))
    if row.get("variant") == "bfloat16 decode":
        pipe.to(torch.bfloat16)
        pipe.vae.register_to_config(force_upcast=False)
    return pipe


def request(row: Row) -> Request:
    asked = {name: row[name] for name in ("height", "width", "frames", "batch", "guidance") if row.get(name)}
    return known_model(row["model"]).request.model_copy(update={**asked, "steps": 2})


def measured(row: Row) -> list[dict[str, Any]]:
    """The component calls of a call of two steps: phase, runs and kernels of each, those of similar kernels summed."""
    footprint: Footprint = measure_footprint(pipeline(row), request(row))
    found = []
    for phase in footprint.phases:
        for call in phase.calls:
            groups = [group for use in call.block_uses for work in use.layer_work for group in work.work]
            found.append(
                {"phase": phase.name, "component": call.component, "runs": call.runs, "groups": summed(groups)}
            )
        if phase.other_work:
            found.append({"phase": phase.name, "component": "", "runs": 1, "groups": summed(phase.other_work)})
    return found


def summed(groups: Sequence[Any]) -> list[Group]:
    """Groups of kernels, those of similar intensity and size joined."""
    sums: dict[Any, tuple[Amounts, int, int]] = {}
    for group in groups:
        each = group.amounts
        intensity = round(4 * math.log2(each.operations / each.traffic)) if each.operations and each.traffic else None
        size = round(2 * math.log2(each.traffic / group.kernels)) if each.traffic else None
        key = group.kind, group.dtype, intensity, size, each.divisions > 0
        amounts, kernels, calls = sums.get(key, (Amounts(0, 0), 0, 0))
        sums[key] = amounts.plus(each), kernels + group.kernels, calls + group.module_calls
    return [(kind, dtype, kernels, calls, tuple(own)) for (kind, dtype, *_), (own, kernels, calls) in sums.items()]


def measure_all() -> None:
    known: dict[str, Any] = json.loads(WORK.read_text()) if WORK.exists() else {}
    for row in rows():
        key = key_of(row)
        if key not in known:
            known[key] = measured(row)
            WORK.write_text(json.dumps(known))
            print(key)


# times


def device_of(card: str, clock: Clock) -> Accelerator:
    facts = card_facts(card)
    rates = catalog_clock.rates(facts, clock) | catalog_clock.host_rates(clock)
    return Accelerator(
        name=card, kind="simulated", bytes=facts["bytes"], compute_capability=facts["compute_capability"], **rates
    )


def seconds_of(groups: Sequence[Group], device: Accelerator) -> float:
    """Seconds of a component's call: of the device or of the host, whichever takes longer."""
    computing = sum(
        kernel_seconds(device, kind, dtype, Amounts(*own), kernels) for kind, dtype, kernels, _, own in groups
    )
    launching = sum(g[2] * device.launch_overhead + g[3] * device.module_overhead for g in groups)
    return max(computing, launching)


def predicted(row: Row, work: Mapping[str, Any], clock: Clock) -> float:
    device = device_of(row["card"], clock)
    calls = work[key_of(row)]
    passes, rest, decode = list[float](), 0.0, 0.0
    for call in calls:
        took = [seconds_of(call["groups"], device)] * call["runs"]
        if call["phase"] == "denoise" and call["component"]:
            passes += took
        else:
            rest += sum(took)
            decode += sum(took) if call["phase"] == "decode" else 0.0
    single = statistics.mean(passes)
    step = single * (len(passes) // 2)
    rest += sum(passes) - 2 * step  # of a scheduler that adds a pass to those of its steps
    steps = row.get("steps") or 1
    return {
        "call": steps * step + rest,
        "step": step,
        "pass": single,
        "rest": rest,
        "steps": steps * step,
        "decode": decode,
    }[row["what"]]


# fit


def clock_with(values: Sequence[float]) -> Clock:
    """The clock whose fitted parameters are so many deviations from what was guessed."""
    changed = {
        name: guess * math.exp(deviation * value)
        for (name, (guess, deviation)), value in zip(FITTED.items(), values, strict=True)
    }
    return dataclasses.replace(Clock(), **changed)


def error_of(row: Row, work: Mapping[str, Any], clock: Clock) -> float:
    """Logarithm of predicted by published."""
    low, high = row["seconds"]
    return math.log(predicted(row, work, clock) / math.sqrt(low * high))


def fitted(given: Sequence[Row], work: Mapping[str, Any]) -> list[float]:
    """Deviations of the fitted parameters, by Gauss-Newton steps on the errors and the deviations themselves."""
    values = np.zeros(len(FITTED))

    def residuals(at: np.ndarray) -> np.ndarray:
        clock = clock_with(at.tolist())
        errors = np.array([error_of(row, work, clock) for row in given]) / SPREAD
        weights = np.array([row.get("weight", 1.0) for row in given]) ** 0.5
        return np.concatenate([errors * weights / np.maximum(1, np.abs(errors) / 3) ** 0.5, at])

    for _ in range(8):
        here = residuals(values)
        slopes = np.stack([(residuals(values + 0.05 * e) - here) / 0.05 for e in np.eye(len(values))], axis=1)
        values = np.clip(values - np.linalg.lstsq(slopes, here, rcond=None)[0], -3, 3)
    found: list[float] = values.tolist()
    return found


def report(errors: Sequence[float]) -> str:
    relative = [abs(math.expm1(error)) for error in errors]
    return f"median {statistics.median(relative):.1%}, worst {max(relative):.1%}, of {len(relative)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["work", "fit", "table"])
    options = parser.parse_args()
    if options.command == "work":
        return measure_all()
    work, every = json.loads(WORK.read_text()), rows()
    every = [row for row in every if key_of(row) in work]
    return {"fit": show_fit, "table": make_table}[options.command](every, work)


def show_fit(every: list[Row], work: Mapping[str, Any]) -> None:
    used = [row for row in every if row.get("fit", True)]
    values = fitted(used, work)
    clock = clock_with(values)
    for name, value in zip(FITTED, values, strict=True):
        print(f"{name} {getattr(clock, name):.4g} ({value:+.1f} deviations)")
    for row in every:
        error = math.expm1(error_of(row, work, clock))
        print(f"{error:+6.0%} {'' if row.get('fit', True) else 'not fitted '}{row['card']} {row['what']} {key_of(row)}")
    print("fitted:", report([error_of(row, work, clock) for row in used]))
    listed = [row for row in every if row.get("listed")]
    print("listed:", report([error_of(row, work, clock) for row in listed]))


def make_table(every: list[Row], work: Mapping[str, Any]) -> None:
    """Errors of the clock as it is, and of fits without a row, without its card, and without its model."""
    clock, used = Clock(), [row for row in every if row.get("fit", True)]
    here = [error_of(row, work, clock) for row in every]
    without: dict[str, list[float]] = {}
    for name, same in _groups().items():
        fits: dict[tuple[int, ...], list[float]] = {}  # by the rows that are left
        errors = []
        for row in used:
            kept = tuple(index for index, other in enumerate(used) if not same(row, other))
            if kept not in fits:
                fits[kept] = fitted([used[index] for index in kept], work)
                print(f"\rwithout its {name}: {len(fits)} fits", end="", flush=True)
            errors.append(error_of(row, work, clock_with(fits[kept])))
        without[name] = errors
        print(f"\rwithout its {name}:", report(errors))
    found = []
    places = {id(row): place for place, row in enumerate(used)}
    for row, error in zip(every, here, strict=True):
        entry = {**row, "predicted": round(predicted(row, work, clock), 4), "error": round(math.expm1(error), 3)}
        if id(row) in places:
            entry |= {f"error_without_{name}": round(math.expm1(e[places[id(row)]]), 3) for name, e in without.items()}
        found.append(entry)
    print("all:", report(here), "fitted:", report([error_of(row, work, clock) for row in used]))
    write("clock", {"rows": found})


def _groups() -> dict[str, Callable[[Row, Row], bool]]:
    return {
        "row": lambda one, other: one is other,
        "card": lambda one, other: one["card"] == other["card"],
        "model": lambda one, other: one["model"] == other["model"],
    }


if __name__ == "__main__":
    main()
