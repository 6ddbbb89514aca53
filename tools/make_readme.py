"""bench/results/*.json → the tables of README.md and of the demo model's card. Run by `make bench`.

python tools/make_readme.py          # rewrite what stands between the markers
python tools/make_readme.py --check  # exit 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.units import format_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
PAGES = (ROOT / "README.md", ROOT / "src/tightfit/demo/model/README.md")


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


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


def predict() -> str:
    rows = []
    for name, row in read("predict").items():
        if name == "machine":
            continue
        low, high = row["measured_gib"]
        measured = f"{low} GiB" if low == high else f"{low} to {high} GiB"
        case = f"{name} transformer, {row['request']}"
        rows.append((case, f"{row['predicted_gib']:.2f} GiB", measured, f"{row['error']:+.2%}", f"{row['seconds']} s"))
    return table(("one forward pass, bfloat16", "predicted peak", "measured elsewhere", "error", "found out in"), rows)


BLOCKS: dict[str, Callable[[], str]] = {"score": score, "levels": levels, "vae": vae, "fp8": fp8, "predict": predict}


def fill(page: str) -> str:
    def block(match: re.Match[str]) -> str:
        try:
            measured = BLOCKS[match[1]]()
        except FileNotFoundError as missing:
            measured = f"(not measured yet: {Path(missing.filename).name} is missing)"
        return f"<!-- generated: {match[1]} -->\n{measured}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path in PAGES if fill(path.read_text()) != path.read_text()]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} does not say what bench/results says: run tools/make_readme.py")
        else:
            path.write_text(fill(path.read_text()))
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
