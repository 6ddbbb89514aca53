"""A hard limit of memory for one process, what it held in it, and how fast the disk was beside it.

Linux alone, with memory cgroups of version 1, as root. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/memory")
SAMPLE_SECONDS = 0.02
READ_BLOCK = 4 * 2**20


def can_cage() -> bool:
    return (CGROUPS / "memory.limit_in_bytes").exists() and os.geteuid() == 0


def drop_caches() -> None:
    """Pages of libraries and weights that nobody maps are forgotten, so that whoever reads them next pays for them."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


class Cage:
    """A memory cgroup: what runs in it and needs more than its limit is killed."""

    def __init__(self, cap: int | None) -> None:
        self.folder = CGROUPS / f"tightfit-bench-{os.getpid()}"
        self.folder.mkdir()
        self._set("swappiness", 0)
        if cap is not None:
            self._set("limit_in_bytes", cap)

    def _set(self, name: str, value: int) -> None:
        (self.folder / f"memory.{name}").write_text(str(value))

    def _count(self, file: str, name: str) -> int:
        lines = (self.folder / f"memory.{file}").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)

    @property
    def anonymous(self) -> int:
        return self._count("stat", "rss")

    @property
    def kills(self) -> int:
        return self._count("oom_control", "oom_kill")

    def start(self, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        """`command` from its first instruction on inside."""
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]
        with output.open("wb") as out, output.with_suffix(".errors").open("wb") as errors:
            return subprocess.Popen(inside, stdout=out, stderr=errors)

    def close(self) -> None:
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._set("force_empty", 0)
                self.folder.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def caged(cap: int | None) -> Iterator[Cage]:
    cage = Cage(cap)
    try:
        yield cage
    finally:
        cage.close()


def watch(process: subprocess.Popen[bytes], cage: Cage, limit: float) -> list[tuple[float, int]]:
    """Anonymous bytes at each moment until `process` ends; it is ended after `limit` seconds."""
    samples, end = [], time.monotonic() + limit
    try:
        while process.poll() is None:
            samples.append((time.monotonic(), cage.anonymous))
            if samples[-1][0] > end:
                break
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()
        process.wait()
    return samples


def count_torch_processes() -> int:
    """Others that have torch loaded: they take the processor, and pages of its libraries are charged to them."""
    count = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            count += "libtorch_cpu" in maps.read_text()
    return count


def disk_rate(files: list[Path]) -> float:
    """Bytes per second of direct reads, by one thread or two, whichever is faster."""
    return max(_direct_reads(files, 1), _direct_reads(files, 2))


def _direct_reads(files: list[Path], threads: int) -> float:
    def read(thread: int) -> int:
        buffer, count = mmap.mmap(-1, READ_BLOCK), 0
        for file in files:
            handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
            offsets = range(thread * READ_BLOCK, file.stat().st_size, threads * READ_BLOCK)
            count += sum(os.preadv(handle, [buffer], offset) for offset in offsets)
            os.close(handle)
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(read, range(threads)))
    return count / (time.perf_counter() - started)
