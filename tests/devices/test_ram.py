"""Host memory within control groups: what is held, what is left, and ends with figures instead of kills.

Groups of version 2 are folders of files here: no computer with it was available. Those of version 1 are real.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightfit import BudgetTooSmall
from tightfit.devices import ram
from tightfit.devices.device import CpuDevice
from tightfit.devices.ram import GroupMemory, computer_mark, group_memory, held_bytes, ram_free, ram_limit
from tightfit.devices.ram_guard import TORCH, check_ram
from tightfit.schema.machine import GROUP_SPARE, Accelerator, Machine

MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ram, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(ram, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/user/job\n")
    return tmp_path / "cgroup"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def limit(folder: Path, size: int | str, used: int, stat: str = "anon 0", high: int | str = "max") -> None:
    write(folder, max=size, high=high, current=used, stat=stat)


def test_a_computer_is_told_by_its_kernel_and_not_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "node")
    (tmp_path / "boot_id").write_text("420dfa54\n")
    monkeypatch.setattr(ram, "BOOT", tmp_path / "boot_id")
    assert computer_mark() == "420dfa54"
    monkeypatch.setattr(ram, "BOOT", tmp_path / "none")
    assert computer_mark() == "node"


def test_above_high_everything_is_slow_so_it_is_the_limit(groups: Path) -> None:
    limit(groups / "user" / "job", 900, 100, high=500)
    assert group_memory() == GroupMemory(limit=500, used=100)
    limit(groups / "user" / "job", 400, 100, high=500)
    assert group_memory() == GroupMemory(limit=400, used=100)
    limit(groups / "user" / "job", "max", 100, high="max")
    assert group_memory() is None


def test_the_group_that_has_the_least_left_counts(groups: Path) -> None:
    limit(groups / "user" / "job", 1000, 100)
    limit(groups / "user", 2000, 1500)
    assert group_memory() == GroupMemory(limit=2000, used=1500)
    assert (ram_limit(), ram_free()) == (1000, 500)


def test_what_the_kernel_can_drop_is_not_used(groups: Path) -> None:
    stat = "anon 300\nactive_file 100\ninactive_file 50\nslab_reclaimable 7\nslab_unreclaimable 9\nshmem 40"
    limit(groups / "user" / "job", 1000, 700, stat)
    assert group_memory() == GroupMemory(limit=1000, used=700 - 157)


@pytest.mark.parametrize("broken", ["no number", "", "max\nmax"])
def test_files_that_say_something_else_are_no_limit(broken: str, groups: Path) -> None:
    limit(groups / "user" / "job", broken, 100)
    assert group_memory() is None
    limit(groups / "user" / "job", 1000, 100, stat=broken)
    assert group_memory() == GroupMemory(limit=1000, used=100)


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(32 * MIB))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages:
        before = held_bytes()
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert held_bytes() - before < 4 * MIB
        pages[:] = bytes(len(pages))
        assert held_bytes() - before > 28 * MIB


def test_where_the_system_does_not_say_everything_resident_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held_bytes()
    monkeypatch.setattr(ram, "STATUS", Path("missing"))
    assert held_bytes() > before


def test_what_is_short_in_the_group_is_to_be_evicted(groups: Path) -> None:
    device = CpuDevice()
    undo = device.limit_memory(100)
    limit(groups / "user" / "job", 1000 * MIB, 0)
    assert device.excess_bytes(lambda: 50) == 0
    limit(groups / "user" / "job", 1000 * MIB, 1000 * MIB - GROUP_SPARE + 7)
    assert [device.excess_bytes(lambda held=held: held) for held in (50, 150)] == [7, 50]
    undo()
    assert device.excess_bytes(lambda: 150) == 7


def test_torch_is_not_imported_where_it_does_not_fit(groups: Path) -> None:
    limit(groups / "user" / "job", TORCH + 20 * MIB, 20 * MIB)
    check_ram()
    limit(groups / "user" / "job", TORCH + 20 * MIB - 1, 20 * MIB)
    with pytest.raises(BudgetTooSmall, match=r"of the 180 MiB .* group may hold, 160 MiB are left.* takes 160 MiB"):
        check_ram()


def test_a_machine_is_what_its_group_leaves(groups: Path) -> None:
    from tightfit.run.planning_context import within_group

    cpu = Accelerator(name="cpu", kind="cpu", bytes=2**33, free=2**32)
    machine = Machine(accelerators=(cpu,), ram=2**33, ram_used=100 * MIB, cores=1)
    assert within_group(machine) == machine
    limit(groups / "user" / "job", 2**40, 2**40 - 50 * MIB)
    within = within_group(machine)
    assert abs(within.accelerators[0].bytes - held_bytes() - 50 * MIB) < 8 * MIB
    assert within.ram_limit == within.accelerators[0].bytes
    assert within.accelerators[0].free == within.accelerators[0].bytes - 100 * MIB


# real groups


class Group:
    """A control group of version 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.write("swappiness", 0)

    def write(self, name: str, value: int) -> None:
        (self._folder / f"memory.{name}").write_text(str(value))

    @property
    def kills(self) -> int:
        (line,) = [
            line for line in (self._folder / "memory.oom_control").read_text().splitlines() if "oom_kill " in line
        ]
        return int(line.split()[1])

    def start(self, *command: str) -> subprocess.Popen[str]:
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"), sys.executable]
        return subprocess.Popen([*inside, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def group() -> Iterator[Group]:
    folder = Path("/sys/fs/cgroup/memory") / f"tightfit-ram-{os.getpid()}"
    if os.geteuid() != 0 or not (folder.parent / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and control groups of version 1")
    folder.mkdir()
    yield Group(folder)
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


@pytest.mark.parametrize("size", [40, 150])
def test_a_limit_below_what_torch_takes_is_said_before_it_is_imported(size: int, group: Group) -> None:
    group.write("limit_in_bytes", size * MIB)
    _, err = (process := group.start("-m", "tightfit", "machine")).communicate(timeout=60)
    assert (process.returncode, group.kills) == (3, 0)
    assert err.startswith(f"tightfit: out of memory: of the {size} MiB that this process's control group may hold")
    assert len(err.splitlines()) == 1


GROWS = """
import sys, time
from tightfit.devices.ram_guard import guard_ram
guard_ram()
print("ready", flush=True)
pieces = []
while True:
    pieces.append(bytearray(int(sys.argv[1])))
    time.sleep(0.005)
"""


def test_a_process_that_grows_ends_with_figures(group: Group) -> None:
    group.write("limit_in_bytes", 200 * MIB)
    _, err = (process := group.start("-c", GROWS, str(MIB))).communicate(timeout=60)  # 200 MiB a second
    assert (process.returncode, group.kills) == (3, 0)
    assert "out of memory: of the 200 MiB that this process's control group may hold, 1" in err


def test_a_limit_that_shrinks_ends_it_with_figures(group: Group) -> None:
    group.write("limit_in_bytes", 400 * MIB)
    process = group.start("-c", GROWS, "0")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for size in range(400, 0, -2):
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            group.write("limit_in_bytes", size * MIB)
        time.sleep(0.01)  # 200 MiB a second
    _, err = process.communicate(timeout=60)
    assert (process.returncode, group.kills) == (3, 0)
    assert "out of memory: of the" in err


TAKES = """
import sys, time
from tightfit.devices.ram import group_memory
pieces = []
while group_memory().free > int(sys.argv[1]):
    pieces.append(bytearray(2**20))
    time.sleep(0.005)
time.sleep(60)
"""


@pytest.mark.parametrize("left", [2, 8])
def test_a_neighbour_that_takes_nearly_all_ends_it_with_figures(left: int, group: Group) -> None:
    group.write("limit_in_bytes", 200 * MIB)
    process = group.start("-c", GROWS, "0")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    neighbour = group.start("-c", TAKES, str(left * MIB))
    try:
        _, err = process.communicate(timeout=60)
        assert (process.returncode, group.kills) == (3, 0)
        assert "out of memory: of the 200 MiB that this process's control group may hold" in err
        assert re.search(r"others and the system 1\d\d MiB", err)
    finally:
        for each in (process, neighbour):
            each.kill()
            each.communicate()


# whole commands, with the demo model

RUN = ("-m", "tightfit", "run", "a red circle", "--steps", "1", "--seed", "1", "--device", "cpu", "--out", "fox.png")


@pytest.mark.slow
@pytest.mark.parametrize("size", [250, 320, 380])
def test_a_run_whose_limit_is_too_low_ends_with_figures(
    size: int, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch fits into it, and the rest does not: the kernel killed it, without a message."""
    monkeypatch.chdir(tmp_path)
    group.write("limit_in_bytes", size * MIB)
    _, err = (process := group.start("-W", "ignore", *RUN)).communicate(timeout=300)
    assert (process.returncode, group.kills) == (3, 0)
    assert "MiB" in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("tightfit: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_whose_limit_is_enough_is_not_refused(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of files counted as held, so that limits up to 640 MiB were refused."""
    monkeypatch.chdir(tmp_path)
    group.write("limit_in_bytes", 560 * MIB)
    _, err = (process := group.start("-W", "ignore", *RUN, "--level", "0")).communicate(timeout=300)
    assert (process.returncode, group.kills, err) == (0, 0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["fox.png"]
