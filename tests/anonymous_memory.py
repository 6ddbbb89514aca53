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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Seen", "anonymous_bytes", "highest_anonymous"]

EVERY = 0.002  # seconds between two looks
STEP = 4 * 2**20  # bytes more than ever before, for which the kernel's sum is worth asking


@dataclass
class Seen:
    """The most that was seen, in so many `looks`, of which two were never further apart than `gap` seconds."""

    most: int = 0  # bytes, by smaps_rollup: the kernel walks through all pages, so it is asked at each new high
    counted: int = 0  # bytes, by the kernel's running count (RssAnon), which costs nothing and may be some pages off; …
    # … without forked copies, as it has what they share for each of them: the kernel's sum is asked all along meanwhile
    looks: int = 0
    gap: float = 0.0


def anonymous_bytes(pid: int) -> int:
    """Of the process `pid` and of all that it started, by smaps_rollup; what forked copies share counts once."""
    return _sum([*_found(pid)], "smaps_rollup", "Pss_Anon:")


def _found(pid: int, but: int = 0) -> dict[int, bool]:
    """The process `pid` and all that it started, without the process `but`; and whether each is a forked copy."""
    found, waiting = {}, [(pid, b"")]
    while waiting:
        now, starter = waiting.pop()
        try:
            own = Path(f"/proc/{now}/cmdline").read_bytes()
            children = [int(child) for task in Path(f"/proc/{now}/task").iterdir() for child in _children(task)]
        except OSError:  # it has ended
            continue
        if now != but:
            found[now] = own == starter
            waiting += [(child, own) for child in children]
    return found


def _sum(pids: Iterable[int], file: str, name: str) -> int:
    """What `file` says of these processes."""
    found = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
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
    seen, over, asked = Seen(), threading.Event(), 0
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()

    def look(*, ask: bool) -> None:
        nonlocal asked
        processes = _found(pid, own)
        counted = _sum((each for each, copied in processes.items() if not copied), "status", "RssAnon:")
        seen.counted = max(seen.counted, counted)
        if ask or any(processes.values()) or counted >= asked + STEP:
            asked = max(asked, counted)
            now = _sum(processes, "smaps_rollup", "Pss_Anon:")
            if _found(pid, own) == processes:  # else what a copy shared, that began or ended meanwhile, counted twice
                seen.most = max(seen.most, now)

    look(ask=True)
    print("begun", flush=True)
    last = time.monotonic()
    while not over.wait(EVERY):
        look(ask=False)
        now = time.monotonic()
        seen.looks, seen.gap, last = seen.looks + 1, max(seen.gap, now - last), now
    look(ask=True)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
