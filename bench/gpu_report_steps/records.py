"""What steps have measured, in result files: a JSON object each, with a record for each step."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.files import replacing

__all__ = ["ROOT", "Record", "Row", "commit", "read_records", "sources", "write_record"]

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("src", "tests/gpu", "tests/cuda_stub", "bench/gpu_report_steps")


def sources() -> str:
    """A digest of the code that is measured and of the code that measures; works without git."""
    files = sorted(file for folder in _SOURCES for file in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for file in [*files, ROOT / "bench" / "gpu_report.py"]:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The checkout's commit, or "unknown" where there is no git."""
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_records(file: Path) -> dict[str, Row]:
    """The records in `file` by the names of their steps."""
    return dict(json.loads(file.read_text())["steps"]) if file.exists() else {}


def write_record(file: Path, name: str, record: Row) -> None:
    records = read_records(file) | {name: record}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial:
        partial.write_text(json.dumps({"steps": records}, indent=1) + "\n")


class Record:
    """The record of one step while it runs: rows are written as they are measured, and those already there stay."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name
        self.rows: list[Row] = list(read_records(file).get(name, {}).get("rows", []))

    def find(self, **about: Any) -> Row | None:
        return next((row for row in self.rows if row.items() >= about.items()), None)

    def missing(self, wanted: list[Row]) -> Iterator[Row]:
        """Those of `wanted` for which there is no row yet."""
        return (about for about in wanted if self.find(**about) is None)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        record = read_records(self.file).get(self.name, {})
        write_record(self.file, self.name, record | {"rows": self.rows})
        print(json.dumps(row), flush=True)
