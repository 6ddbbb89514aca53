"""bench/results/*.json → the tables of README.md and of the demo model's card. Run by `make bench`.

python tools/make_tables.py          # rewrite what stands between the markers
python tools/make_tables.py --check  # exit 1 if that would change anything
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.report.chart import NONE
from tightfit.units import format_bytes, format_seconds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
PAGES = (
    ROOT / "README.md", ROOT / "src/tightfit/demo/model/README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "demo-model", "device-maps", "prediction-accuracy")),
    *(ROOT / "docs" / f"{name}.md" for name in ("models", "step-caches", "torchrun")),
)  # fmt: skip
OURS = "tightfit"  # among contenders
SWITCHES = {  # of diffusers, as bench/rivals.py calls them
    "all on the card": "`to(device)`",
    "diffusers: models": "model offload",
    "diffusers: sequential": "sequential offload",
    "diffusers: leaves": "group offload, leaf level",
    "diffusers: blocks": "group offload, block level",
}
COMPARED = (  # model, request, GiB of the card: the README's table
    ("sdxl", "1024×1024", 6),
    ("flux.1-dev", "1024×1024", 8),
    ("flux.1-dev", "512×512", 16),
    ("cogvideox-5b", "720×480, 49 frames", 12),
    ("wan-2.1-14b", "832×480, 81 frames", 16),
)
SHOWN = (
    "sdxl",
    "flux.1-dev",
    "qwen-image",
    "cogvideox-5b",
    "wan-2.1-14b",
    "hunyuanvideo",
)  # budgets; docs/budgets.md has all


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    all_rows = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in all_rows)


def score() -> str:
    facts = read("demo-score")
    rows = [
        (name, facts[key]["prompts"], facts[key]["right"], f"{facts[key]['share']:.1%}")
        for name, key in (("one object", "one_object"), ("two objects", "two_objects"))
    ]
    return table(("prompts with", "asked", "entirely right", "share"), rows)


def levels() -> str:
    facts = read("levels")
    rows = [
        (
            name,
            format_bytes(row["peak_bytes"]),
            format_bytes(row["peak_weight_bytes"]),
            format_bytes(row["bytes_in"]),
            f"{row['time_ratio']:.2f} ×",
            f"{row['time_ratio_counted']:.2f} ×",
            "yes" if row["same_bits"] else "**no**",
        )
        for name, row in facts.items()
        if name.startswith("level")
    ]
    head = ("", "peak", "of which weights", "moved in", "time against untouched", "while counting", "same bits")
    return table(head, rows)


def vae() -> str:
    facts = read("vae")
    rows = []
    for what in ("tiling", "slicing"):
        batch, _, height, width = facts[what]["latents"]
        for name, row in facts[what].items():
            if name == "latents":
                continue
            error = "–" if row["psnr"] is None else f"{row['psnr']} dB"
            case = f"{batch} × {height * 8}×{width * 8}"
            rows.append((case, name, format_bytes(row["peak_bytes"]), f"{row['time_ratio']:.2f} ×", error))
    return table(("decoded", "how", "peak above weights", "time against whole", "PSNR against whole"), rows)


def fp8() -> str:
    demo, model, rows = read("fp8-demo"), read("fp8-transformer"), []
    for form in ("float8_e4m3fn", "float8_e5m2"):
        theirs = demo[f"diffusers {form}"]["psnr"]
        rows.append(
            (
                form,
                f"{demo[form]['share']:.2f} ×",
                f"{model[form]['share']:.2f} ×",
                f"{demo[form]['psnr']} dB",
                f"{theirs} dB",
            )
        )
    head = (
        "",
        "demo UNet, bytes of float16",
        "100 M transformer, bytes of bfloat16",
        "demo pictures, PSNR",
        "diffusers' casting, PSNR",
    )
    return table(head, rows)


def gradients() -> str:
    rows, first = [], read("gradients")["rows"][0]
    for row in read("gradients")["rows"]:
        rows.append((row["plan"], format_bytes(row["peak"]), f"{row['peak'] / first['peak']:.2f} ×"))
    return table(("plan", "peak of weights, activations, gradients and optimizer", "of the peak without a plan"), rows)


def loading() -> str:
    facts = read("loading")
    plain, names = "plain read", {
        "plain read": "plain read of the files", "from_pretrained": "`from_pretrained`, which maps files",
        "from_pretrained disable_mmap": "`from_pretrained(disable_mmap=True)`", "level-0": "`load(level=0)`, CPU",
        "level-2": "`load(level=2)`, `loopback`", "level-3": "`load(level=3)`, `loopback`",
        "disk": "`load`, weights left on disk, CPU",
        "from_pretrained + fit level-2": "`from_pretrained`, `fit(level=2)`",
        "from_pretrained + fit level-3": "`from_pretrained`, `fit(level=3)`",
    }  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for row in facts["summary"]:
        read_all, name = row["contender"] != "disk", row["contender"]
        memory = [format_bytes(max(row[key], 0)) for key in ("stays", "peak_above")] if name != plain else [NONE] * 2
        rows.append((
            names[name], "cold" if row["cold"] else "warm", format_seconds(row["seconds"]),
            f"{row['of_disk_rate']:.0%}" if read_all and row["cold"] else NONE,
            f"{row['times_theirs']:.2f} ×", f"{row['times_no_mmap']:.2f} ×", *memory,
        ))  # fmt: skip
    return table(
        ("", "files", "time", "of the disk's rate", "of `from_pretrained`", "of `disable_mmap`", "memory that stays",
         "peak above it"), rows,
    )  # fmt: skip


def reliability() -> str:
    signals, groups, inputs = (lines(name) for name in ("signals", "group-limits", "fuzz"))
    sent, after = [row for row in signals if "signal" in row], [row for row in signals if "again" in row]
    left, wrong = sum(bool(row["left"]) for row in signals), sum(not row["again"] for row in after)
    drawn = [row for row in groups if row["code"] == 0]
    killed, other = sum(row["kills"] for row in groups), sum(not row["same"] for row in drawn)
    right, raw = sum(row["input"].startswith("right") for row in inputs), sum("wrong" in row for row in inputs)
    rows = [
        ("TERM, HUP, INT or KILL at a random moment of `run`, `plan` or `chart` (`bench/signals.py`)", len(sent),
         f"{left} left files behind; of {len(after)} commands after them, {wrong} were wrong"),
        ("a run in a control group: a low limit, a lowered one, a neighbour that grows (`bench/group_limits.py`)",
         len(groups), f"{killed} killed, {other} other pictures; {len(groups) - len(drawn)} ended with their figures"),
        *_kills(),
        ("a random folder, plan, request or option; a third are right (`tests/fuzz`)", f"{len(inputs):,}",
         f"{raw} raw errors; all {right:,} right ones drew their picture"),
        *(_many_calls(device) for device in ("loopback", "cpu")),
    ]  # fmt: skip
    return table(("what", "times", "what came of it"), rows)


def _kills() -> list[tuple[object, ...]]:
    """One line for each kind of process that `bench/kills.py` kills."""
    rows = lines("kills")
    ranks, shards, batches = ([row for row in rows if row["kind"] == kind] for kind in ("rank", "shard", "ray"))
    ended = [row for row in ranks if row["code"] != 0]
    begun = [row["seconds"] for row in ended if not any("did not begin" in line for line in row["said"])]
    late = [row["seconds"] for row in ended if any("did not begin" in line for line in row["said"])]
    slow = f" ({len(late)} waited for a rank that had not begun: up to {max(late):.0f} s)" if late else ""
    damaged = sum(row["picture"] not in ("none", "whole") or bool(row["left"]) for row in ranks)
    again = sum(row["again"] == [0, True] for row in ranks)
    kept = sum(row["kept"] and not row["there"] for row in shards)
    whole = sum(row["again"] == [0, True] for row in shards)
    taken = sum(set(row["taken"]) - ({f"{look} dst" for look in ("load", "plan", "verify")} if row["there"] else set())
                != set() for row in shards)  # fmt: skip
    failed, missing = sum(row["failed"] for row in batches), sum(row["missing"] for row in batches)
    complete, damaged_pictures = (sum(row[what] for row in batches) for what in ("whole", "damaged"))
    return [
        ("KILL of one of two ranks at a random moment (`bench/kills.py`)", len(ranks),
         f"the other ended with one line after {max(begun):.1f} s at the most{slow}; {damaged} damaged files; "
         f"{again} of {len(ranks)} runs after them were right"),
        ("KILL of `tightfit shard` at a random moment (`bench/kills.py`)", len(shards),
         f"{taken} unfinished folders were taken for whole; {whole} of {len(shards)} runs after them completed it, "
         f"{kept} from where the killed one was"),
        ("KILL of a worker of a batch of 30 on Ray (`bench/kills.py`)", sum(len(row["kills"]) for row in batches),
         f"{damaged_pictures} damaged pictures; {missing} missing, of which {failed} had lost three "
         f"workers; {complete} of {len(batches)} batches were complete after the next run"),
    ]  # fmt: skip


def _many_calls(device: str) -> tuple[object, ...]:
    calls = read(f"many-calls-{device}")
    growth = format_bytes(max(int(statistics.mean(calls["growth"])), 0))
    return (
        f"a call within a budget on `{device}`, of one of 20 sizes (`bench/many_calls.py`)",
        f"{calls['calls']:,}",
        f"{calls['different']} other pictures; anonymous memory {calls['trend']:+.1%} from call 200 on, its maximum "
        f"{calls['new maximum']:+.1%}; {growth} for each of {calls['new sizes']} new sizes after that",
    )


def published() -> str:
    """One line for each kind of pass: its sizes from the smallest peak to the largest, and the worst error."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in read("published")["rows"]:
        what, _, size = row["pass"].rpartition(" ") if row["method"] != "forward" else (row["pass"], "", "")
        kinds.setdefault(f"{row['model']} {what}, {row['dtype']}", []).append(row | {"size": size})
    rows: list[tuple[object, ...]] = []
    for kind, group in kinds.items():
        group.sort(key=lambda row: float(row["predicted_gib"]))
        sizes = f", {len(group)} sizes, {group[0]['size']} to {group[-1]['size']}" if len(group) > 1 else ""
        worst = max((row["error"] for row in group), key=abs)
        predicted = _span([row["predicted_gib"] for row in group])
        measured = _span([size for row in group for size in row["measured_gib"]])
        reserved = [row["reserved_error"] for row in group if "reserved_error" in row]
        typical = f"{statistics.median(map(abs, reserved)):.1%}, {max(reserved, key=abs):+.1%}" if reserved else "–"
        rows.append((f"{kind}{sizes}", predicted, measured, f"{worst:+.2%}", typical))
    head = ("one pass", "predicted peak", "measured elsewhere", "worst error", "reserved: median error, worst")
    return table(head, rows)


def _span(sizes: list[float]) -> str:
    low, high = f"{min(sizes):.2f}", f"{max(sizes):.2f}"
    return f"{low} GiB" if low == high else f"{low} to {high} GiB"


def clock() -> str:
    """Published times beside predicted ones, with what fits without the row, its card and its model predict."""
    rows = []
    for row in read("clock")["rows"]:
        low, high = row["seconds"]
        size = f"{row['width']}×{row['height']}" + (f"×{row['frames']}" if row.get("frames") else "")
        steps = f", {row['steps']} steps" if row["what"] in ("call", "steps") else ""
        batch = f", batch {row['batch']}" if row.get("batch", 1) > 1 else ""
        what = f"{WHAT[row['what']]} {size}{steps}{batch}"
        published = _seconds(low) if low == high else f"{_seconds(low)} to {_seconds(high)}"
        without = [f"{row[key]:+.0%}" if (key := f"error_without_{name}") in row else "–" for name in WITHOUT]
        rows.append((row["model"], what, row["card"], published, _seconds(row["predicted"]), f"{row['error']:+.0%}",
                     *without))  # fmt: skip
    head = ("model", "what", "card", "published", "predicted", "error", *(f"without its {each}" for each in WITHOUT))
    return table(head, rows)


WITHOUT = ("row", "card", "model")
WHAT = {
    "call": "call", "steps": "steps", "step": "one step", "pass": "one pass", "decode": "decode",
    "rest": "all but the steps",
}  # fmt: skip


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def clock_summary() -> str:
    """Medians and worst errors: of the list that the clock was asked to meet, of all fitted rows, and of the others."""
    found = read("clock")["rows"]
    fitted = [row for row in found if row.get("fit", True)]
    groups = {
        "the list of the issue": ("error", [row for row in found if row.get("listed")]),
        "all rows that were fitted to": ("error", fitted),
        **{f"these, by fits without their {each}": (f"error_without_{each}", fitted) for each in WITHOUT},
        "rows with guessed conditions, not fitted to": ("error", [row for row in found if not row.get("fit", True)]),
    }
    rows = []
    for name, (key, group) in groups.items():
        errors = sorted(abs(row[key]) for row in group)
        within = sum(error <= 0.2 for error in errors) / len(errors)
        rows.append((name, len(errors), f"{statistics.median(errors):.1%}", f"{errors[-1]:.0%}", f"{within:.0%}"))
    return table(("rows", "number", "median error", "worst", "within 20 %"), rows)


def predict(kind: str) -> str:
    rows = []
    for row in read(f"predict-{kind}")["rows"]:
        mine, theirs, error = row["predicted"], row["measured"], row["error"]
        sizes = (format_bytes(mine["bytes"]), format_bytes(theirs["bytes"]), f"{error['bytes']:+.2%}")
        times = (format_seconds(mine["seconds"]), format_seconds(theirs["seconds"]), f"{error['seconds']:+.0%}")
        rows.append((row["row"], *sizes, *times))
    return table(("call", "predicted peak", "measured", "error", "predicted time", "measured", "error"), rows)


def streaming() -> str:
    rows: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in read("streaming-simulated")["rows"]:
        rows.setdefault((row["model"], row["card"]), {})[row["share"]] = row
    shares = sorted({share for cells in rows.values() for share in cells})
    cells = [
        (model, card, format_seconds(by[shares[0]]["compute"]), *(_bounds(by[share]) for share in shares))
        for (model, card), by in rows.items()
    ]
    return table(("denoiser", "card", "all there", *(f"{share:.0%} of its weights" for share in shares)), cells)


def _bounds(row: dict[str, Any]) -> str:
    plain, memory = row["to_bound"], row["to_bound_with_memory"]
    return f"{plain:.3f} ×" if plain < 1.0305 else f"{plain:.3f} × (with memory in mind {memory:.3f} ×)"


def budgets() -> str:
    """A few models at their usual requests, and what became of all of them."""
    usual = {row["model"]: row["request"] for row in reversed(read("budgets-simulated")["rows"])}
    return all_budgets(lambda model, request: model in SHOWN and usual[model] == request)


def all_budgets(shown: Callable[[str, str], bool] = lambda model, request: True) -> str:
    found = read("budgets-simulated")["rows"]
    shares = sorted({row["share"] for row in found})
    rows = []
    for about in dict.fromkeys((row["model"], row["request"], row["card"]) for row in found):
        if not shown(*about[:2]):
            continue
        own = {row["share"]: row for row in found if (row["model"], row["request"], row["card"]) == about}
        fastest = min((row["played"]["denoise"] for row in own.values() if "played" in row), default=1)
        rows.append((*about, *(_within(own[share], fastest) for share in shares)))
    head = ("", "request", "card", *(f"{share:.0%}" for share in shares))
    played = [row for row in found if "played" in row]
    steps = [row["predicted"]["denoise"] / row["played"]["denoise"] - 1 for row in played]
    over = max(row["peak"] / row["predicted_peak"] for row in played)
    refused, failed = (sum(what in row for row in found) for what in ("refused", "failed"))
    said = (
        f"{len(found)} budgets: {len(played)} kept to, {refused} refused, {failed} out of memory. What was said of a "
        f"step was {min(steps):+.1%} to {max(steps):+.1%} off; the highest peak was {over:.0%} of what was said."
    )
    return f"{table(head, rows)}\n\n{said}"


def _within(row: dict[str, Any], fastest: float) -> str:
    if "refused" in row:
        return f"needs {format_bytes(row['needed'])}"
    if "failed" in row:
        return "**out of memory**"
    return f"{format_bytes(row['budget'])}: {row['played']['denoise'] / fastest:.2f} ×"


def rivals() -> str:
    """For each request and budget, tightfit's call, and the fastest of all others."""
    rows = []
    by_budget = rivals_by_budget()
    budgets = sorted({budget for *_, budget in by_budget})
    for about in dict.fromkeys((model, asked) for model, asked, _ in by_budget):
        rows.append((*about, *(_beside(by_budget[*about, budget]) for budget in budgets)))
    compared = [(row, here[OURS]) for here in by_budget.values() for row in here.values() if row["contender"] != OURS]
    kept = [here for here in by_budget.values() if "call" in here[OURS]]
    longer = [row["call"] / own["call"] for row, own in compared if "call" in row and "call" in own]
    alone = sum(all(row.get("tiles") for row in _finished(here).values() if row is not here[OURS]) for here in kept)
    nowhere = sum("call" in row and "call" not in own for row, own in compared)
    said = (
        f"{len(longer)} calls that others finish too take them {min(longer):.4f} to {max(longer):.2f} times as long. "
        f"{len(kept)} of {len(by_budget)} budgets tightfit keeps to, {alone} of them alone with the same pictures; in "
        f"{nowhere} somebody else finishes what it refuses."
    )
    return f"{table(('a call', '', *(f'{budget / 2**30:g} GiB' for budget in budgets)), rows)}\n\n{said}"


def rivals_by_budget() -> dict[tuple[str, str, int], dict[str, dict[str, Any]]]:
    """By model, request and budget, everybody's row by name."""
    found: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in read("rivals-simulated")["rows"]:
        found.setdefault((row["model"], row["request"], row["budget"]), {})[row["contender"]] = row
    return found


def _finished(here: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in here.items() if "call" in row}


def _beside(here: dict[str, dict[str, Any]]) -> str:
    finished = _finished(here)
    own = finished.pop(OURS, None)
    if own is None:
        return f"needs {format_bytes(here[OURS]['needed'])}"
    if not finished:
        return f"{format_seconds(own['call'])}, alone"
    name, best = min(finished.items(), key=lambda item: float(item[1]["call"]))
    tiles = ", tiles" if best.get("tiles") else ""
    return f"{format_seconds(own['call'])}; {best['call'] / own['call']:.3f} × ({name}{tiles})"


def compared() -> str:
    """Five calls of `rivals`: seconds of tightfit, and of the fastest switch of diffusers and of diffusers-mm."""
    by_budget, rows = rivals_by_budget(), []
    for model, request, budget in COMPARED:
        here = by_budget[model, request, budget * 2**30]
        switches = [name for name in here if name.startswith("diffusers:") or name == "all on the card"]
        cells = (_fastest(here, names) for names in ([OURS], switches, ["diffusers-mm"]))
        rows.append((f"{model} {request}", f"{budget} GiB", *cells))
    return table(("call", "limit", "tightfit", "diffusers' fastest switch", "diffusers-mm"), rows)


def _fastest(here: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Of those that finish with the same pictures."""
    seconds = {name: here[name]["call"] for name in names if "call" in here[name] and not here[name].get("tiles")}
    if not seconds:
        return "only with blended tiles" if any("call" in here[name] for name in names) else "out of memory"
    name = min(seconds, key=lambda each: float(seconds[each]))
    how = f" ({SWITCHES[name]})" if len(names) > 1 else ""
    return f"{format_seconds(seconds[name])}{how}"


def classes() -> str:
    """The sentence about docs/pipelines.md, with its numbers."""
    page = (ROOT / "docs" / "pipelines.md").read_text()
    every, made, run, failed = (
        int(re.search(pattern, page)[1])  # type: ignore[index]
        for pattern in (r"has (\d+) classes", r"For (\d+) of them", r"and (\d+) have been run", r"(\d+) have a cell")
    )
    return (
        f"diffusers 0.42 has {every} pipeline classes, of which {made} can be made here with random weights. "
        f"{run} were run at each memory level (0 to 3) and within several budgets: {run - failed} gave the result of "
        f"the untouched pipeline to 1e-5 each time; the other {failed} differ by more, by rounding "
        f"([list](docs/pipelines.md))."
    )


def plan_example() -> str:
    asked = read("chart-simulated")["plans"]["fits"]
    return f"```\n$ {asked['command']}\n{asked['said']}\n```"


def weights(kind: str) -> str:
    names = {"tightfit": "**tightfit**"}
    rows = []
    for row in read(f"weights-{kind}")["summary"]:
        cap = "none" if row["cap"] is None else format_bytes(row["cap"])
        seconds = "–" if row["seconds"] is None else f"{row['seconds']:.2f} s"
        ratios = [f"{row[name]:.2f} ×" if row[name] else "–" for name in ("to_bound", "against_ours")]
        bits = "; ".join(row["failed"]) or ("yes" if row["same_bits"] else "**no**")
        rows.append((names.get(row["contender"], row["contender"]), cap, seconds, *ratios, bits))
    return table(("", "memory", "a pass", "of the bound", "against tightfit", "same bits"), rows)


def strips() -> str:
    rows = []
    for row in read("strips-simulated")["rows"]:
        whole, mine = row["whole"], row["in_strips"]
        taken = (mine["failed"],) if "failed" in mine else (format_bytes(mine["peak"]), f"{row['time_ratio']:.2f} ×")
        memory, maps = format_bytes(row["memory"]), row["maps"]
        rows.append((row["model"], row["picture"], row["dtype"], format_bytes(whole["peak"]), memory, maps, *taken))
    head = ("decoder", "picture", "dtype", "peak whole", "card", "maps", "peak in strips", "time to whole")
    return table(head, rows)


def autoencoders(kind: str) -> str:
    """One line for each decoder: whole, then what the others take of that, their time and their error."""
    decoders: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read(f"activations-{kind}")["autoencoders"]:
        if row["batch"] == 1:
            decoders.setdefault((row["name"], row["size"]), {})[row["contender"]] = row
    others = ("diffusers tiling", "tightfit strips, maps device", "tightfit strips, maps host")
    rows = [
        (f"{name}, {size}", format_bytes(by["whole"]["peak_bytes"]), *(_against_whole(by[other]) for other in others))
        for (name, size), by in decoders.items()
    ]
    return table(("latents", "whole", "diffusers' tiles", "strips", "strips, maps in RAM"), rows)


def _against_whole(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"fails: {row['failed'][:40]}…"
    if any(" runs whole: " in note for note in row.get("notes", ())):
        return "runs whole"
    ram = f" + {format_bytes(row['host_bytes'])} RAM" if row["host_bytes"] else ""
    return f"{row['peak_ratio']:.1%}{ram}, {row['time_ratio']:.2f} ×, {row['error']:.0e}"


def ladder(kind: str) -> str:
    facts = read(f"activations-{kind}")["ladder"]
    rows = [(row["rung"], format_seconds(row["seconds"]), f"{row['faster']:.2f} ×") for row in facts["rows"]]
    return table((f"{facts['model']}, {facts['side']}², {facts['steps']} steps", "a picture", "faster"), rows)


def device_maps() -> str:
    """diffusers' balanced device map beside ours, for the same limits."""
    rows = []
    for row in read("device-maps")["rows"]:
        each = f"{row['share']:.0%}: {format_bytes(row['each_card'])}"
        sides = [(", ".join(side["lost"]) or NONE, _mapped(side)) for side in (row["diffusers"], row["tightfit"])]
        rows.append((f"{row['model']}, {row['request']}", each, *sides[0], *sides[1]))
    fullest = "fullest card (both peaks)"
    return table(("", "each card", "diffusers: lost", fullest, "tightfit: lost", fullest), rows)


def ranks() -> str:
    """Cards that compute a call together: time against one card, bytes sent, peak, and each way alone."""
    rows = []
    for row in read("ranks-simulated")["rows"].values():
        cards = f"{row['cards']} × {row['card']}" + (f" of {row['budget']} GB" if row["budget"] else "")
        asked = f"{row['model']}, {row['request']}"
        if "refused" in row:
            rows.append((asked, cards, row["refused"], *[NONE] * 5))
            continue
        one, seconds = row["one card"], row["seconds"]
        alone = isinstance(one, str)
        ways = (
            f"{way} {format_seconds(its['clock']) if 'clock' in its else 'refused'}" for way, its in row["ways"].items()
        )
        times = "refused" if alone else format_seconds(one), format_seconds(seconds)
        faster = NONE if alone else f"{one / seconds:.2f} ×"
        said = format_bytes(row["sent"]), format_bytes(row["peak"])
        groups = row.get("groups", 1)
        parts = ["two groups"] * (groups > 1) + [row["attention"]] * (row["cards"] > groups)
        rows.append((asked, cards, *times, faster, *said, f"{', '.join(parts)} ({', '.join(ways)})"))
    head = "", "cards", "one card", "together", "faster", "sent by each", "peak of each", "how (each way alone)"
    return table(head, rows)


def step_caches() -> str:
    """Each rival's cache on each pipeline: steps skipped, bytes kept, processor time, difference of the pictures."""
    facts = read("step-cache-rivals")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in facts["rows"].values():
        groups.setdefault((row["rival"], row["family"]), []).append(row)
    rows = []
    for (rival, family), group in sorted(groups.items()):
        blocks = [(row["theirs"]["blocks"], row["ours"]["blocks"]) for row in group]
        skipped = ", ".join(str(len(row["theirs"]["skipped"])) for row in group)
        kept = sorted({f"{row['ours']['kept'] / row['theirs']['kept']:.2f} ×" for row in group})
        times = (
            ", ".join(f"{row[name]['cpu'] / row['plain']['cpu']:.2f} ×" for row in group) for name in ("theirs", "ours")
        )
        difference = max(row["difference"] for row in group)
        rows.append((
            rival, family, f"{skipped} of {facts['steps']}", "yes" if all(a == b for a, b in blocks) else "no",
            ", ".join(kept), *times, "0" if difference == 0 else f"{difference:.0e}",
        ))  # fmt: skip
    for family, row in facts["fitted"].items():
        fitted = f"{row['fitted']['cpu'] / row['plain']['cpu']:.2f} ×"
        rows.append(("none", family, f"0 of {facts['steps']}", NONE, NONE, "1.00 ×", fitted, NONE))
    head = (
        "cache", "pipeline", "steps skipped", "same blocks in each step", "bytes kept, ours ÷ theirs",
        "time, theirs", "time, ours", "pictures differ by",
    )  # fmt: skip
    return table(head, rows)


def step_caches_kept() -> str:
    """Bytes that a step cache keeps, by strategy and model: predicted, and whether that was measured."""
    rows = [row for row in read("step-caches-simulated")["rows"].values() if "strategy" in row]
    by_strategy: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], {})[row["model"]] = row
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = [(f"`{name}`", *(_kept(by.get(model)) for model in models)) for name, by in by_strategy.items()]
    same = sum(row["predicted"] == row["measured"] for row in rows)
    said = f"Bytes kept, predicted before the call. In {same} of {len(rows)} cells the same was measured, to the byte."
    return f"{table(('', *models), cells)}\n\n{said}"


def models() -> str:
    """Every known model, pictures first, and the largest difference of its pipeline class at levels 0 to 3, tiny."""
    found = read("models-simulated")
    tiny = {row["name"]: row.get("levels", {}) for row in lines("pipelines")}
    rows = []
    for name, row in sorted(found["rows"].items(), key=lambda both: ("frames" in both[1]["request"], both[0])):
        steps = f", {row['steps']} steps" if row["steps"] else ""
        levels = tiny[row["pipeline"].removesuffix("Pipeline")]
        rows.append(
            (
                f"`{name}`", row["repository"], f"{row['request']}{steps}", format_bytes(row["weights"]),
                _needs(row["level 0"]), _needs(row[found["budget"]]), _largest(levels),
            )
        )  # fmt: skip
    head = ("", "repository", "request", "weights", "level 0", "within 8 GB", "levels 0 to 3, tiny")
    return table(head, rows)


def _needs(row: dict[str, Any]) -> str:
    """Bytes and the range of the time, if it fits."""
    if not row["fits"]:
        return f"needs {format_bytes(row['needed'])}"
    least, most = map(format_seconds, row["range"])
    return f"{format_bytes(row['needed'])}, {least} to {most}"


def _largest(levels: dict[str, Any]) -> str:
    """The largest difference, or what a level says instead of one."""
    words = [said for said in levels.values() if isinstance(said, str)]
    if words or not levels:
        return words[0] if words else "not run"
    return f"{max(levels.values()):.0e}" if any(levels.values()) else "same bits"


def _kept(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    here, there = row["predicted"], row["measured"]
    return format_bytes(here) if here == there else f"{here} (measured: {there})"


def step_caches_streaming() -> str:
    """Steps that skip, within a budget: time against the plan's forecast, and bytes of each skipped call."""
    rows = []
    for row in (row for row in read("step-caches-simulated")["rows"].values() if "card" in row):
        here, there = row["predicted_seconds"], row["seconds"]
        found = sorted(set(row["in_skipped"]))
        same = found == [row["expected_in_skipped"]]
        bytes_in = ", ".join(map(format_bytes, found)) or NONE
        rows.append(
            (
                f"{row['model']}, {row['card']}", row["cache"].removeprefix("step cache ") or NONE,
                f"{len(row['skipped'])} of {row['steps']}", format_seconds(there), f"{here / there - 1:+z.1%}",
                format_bytes(max(row["in_others"])), bytes_in if same or not found else f"**{bytes_in}**",
                format_bytes(row["loaded_in_vain"]),
            )
        )  # fmt: skip
    head = ("", "step cache", "steps skipped", "denoising", "predicted", "loaded for a call", "for a call that skips",
            "loaded in vain")  # fmt: skip
    return table(head, rows)


def _mapped(side: dict[str, Any]) -> str:
    """What came of a call with a device map."""
    if "refused" in side:
        return "refused: " + side["refused"].split(": ", 1)[1].split(";")[0]
    if side["lost"]:
        return "the call fails"
    if "failed" in side:
        known = {"out of memory": "out of memory", "on the same device": "fails: tensors on two devices"}
        return next((words for said, words in known.items() if said in side["failed"]), f"fails: {side['failed']}")
    return f"{side['fullest']:.0%} ({', '.join(format_bytes(peak) for peak in side['peaks'])})"


BLOCKS: dict[str, Callable[[], str]] = {
    "score": score,
    "levels": levels,
    "models": models,
    "vae": vae,
    "fp8": fp8,
    "device_maps": device_maps,
    "gradients": gradients,
    "loading": loading,
    "reliability": reliability,
    "clock": clock,
    "clock_summary": clock_summary,
    "published": published,
    "ranks": ranks,
    "step_caches": step_caches,
    "step_caches_kept": step_caches_kept,
    "step_caches_streaming": step_caches_streaming,
    "streaming": streaming,
    "budgets": budgets,
    "rivals": rivals,
    "compared": compared,
    "classes": classes,
    "plan_example": plan_example,
    "strips": strips,
    "weights_cpu": functools.partial(weights, "cpu"),
}
for kind in ("cpu", "cuda"):
    BLOCKS[f"autoencoders_{kind}"] = functools.partial(autoencoders, kind)
    BLOCKS[f"ladder_{kind}"] = functools.partial(ladder, kind)
    BLOCKS[f"predict_{kind}"] = functools.partial(predict, kind)


def fill(page: str) -> str:
    def block(match: re.Match[str]) -> str:
        try:
            measured = BLOCKS[match[1]]()
        except FileNotFoundError as missing:
            measured = f"(not measured yet: {Path(missing.filename).name} is missing)"
        except KeyError as missing:
            measured = f"(not measured yet: {missing.args[0]})"
        return f"<!-- generated: {match[1]} -->\n{measured}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path in PAGES if fill(path.read_text()) != path.read_text()]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} does not say what bench/results says: run tools/make_tables.py")
        else:
            path.write_text(fill(path.read_text()))
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
