"""The most anonymous memory that a process and those that it started have had, as another process sees it.

`python anonymous_memory.py PID` looks until its standard input is closed, then prints what it saw. It imports little,
and the process that it looks at does nothing for it: not even its interpreter's lock is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Seen", "anonymous_bytes", "highest_anonymous"]

EVERY = 0.002  # seconds between two looks
STEP = 4 * 2**20  # bytes more than ever before, for which the kernel's sum is worth asking


@dataclass
class Seen:
    """The most that was seen, in so many `looks`, of which two were never further apart than `gap` seconds."""

    most: int = 0  # bytes, by smaps_rollup: the kernel walks through all pages, so it is asked at each new high
    counted: int = 0  # bytes, by the kernel's running count (RssAnon), which costs nothing and may be some pages off
    looks: int = 0
    gap: float = 0.0


def anonymous_bytes(pid: int) -> int:
    """Of the process `pid` and of all that it started, by smaps_rollup; what forked ones share counts once."""
    return _sum(pid, "smaps_rollup", "Pss_Anon:", but=0)


def _sum(pid: int, file: str, name: str, but: int) -> int:
    """What `file` says of `pid` and of all that it started, without the process `but`."""
    found, waiting = 0, [pid]
    while waiting:
        now = waiting.pop()
        if now == but:
            continue
        try:
            lines = Path(f"/proc/{now}/{file}").read_text().splitlines()
            waiting += [int(child) for task in Path(f"/proc/{now}/task").iterdir() for child in _children(task)]
        except OSError:  # it has ended
            continue
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    return found


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


@contextmanager
def highest_anonymous() -> Iterator[Seen]:
    """Fills the `Seen` that it gives when it is left."""
    seen = Seen()
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it has begun
        try:
            yield seen
        finally:
            told, _ = watcher.communicate()
    seen.__dict__.update(json.loads(told))


def main() -> None:
    pid, own = int(sys.argv[1]), os.getpid()
    seen, over = Seen(most=_sum(pid, "smaps_rollup", "Pss_Anon:", own)), threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    asked = seen.counted = _sum(pid, "status", "RssAnon:", own)
    print("begun", flush=True)
    last = time.monotonic()
    while not over.wait(EVERY):
        counted = _sum(pid, "status", "RssAnon:", own)
        seen.counted = max(seen.counted, counted)
        if counted >= asked + STEP:
            asked = counted
            seen.most = max(seen.most, _sum(pid, "smaps_rollup", "Pss_Anon:", own))
        now = time.monotonic()
        seen.looks, seen.gap, last = seen.looks + 1, max(seen.gap, now - last), now
    seen.most = max(seen.most, _sum(pid, "smaps_rollup", "Pss_Anon:", own))
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
