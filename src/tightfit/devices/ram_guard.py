"""Ends a command, with figures, before the kernel kills it: where its control group has next to no memory left.

A run within a budget evicts weights, and is planned anew, earlier than that (`GROUP_SPARE`). This is for what that does
not see: modules that are imported, a limit that is lowered, or another process that takes more, faster than weights go.
"""

from __future__ import annotations

import contextlib
import threading
import time

from tightfit.devices.ram import GROUPS, GroupMemory, group_memory, held_bytes
from tightfit.errors import BudgetTooSmall
from tightfit.signals import end_process
from tightfit.units import format_bytes

__all__ = ["check_ram", "guard_ram"]

LEAST = 12 * 2**20  # bytes that may be left
FASTEST = 2**30  # bytes per second that may be taken meanwhile
LONGEST = 0.1  # seconds between two looks
TORCH = 160 * 2**20  # bytes: importing it takes 130 MiB, mostly in one call during which no other thread runs


def check_ram() -> None:
    """Raise BudgetTooSmall where this process's control group has too little left to import torch."""
    group = group_memory()
    if group is not None and group.free < TORCH:
        raise BudgetTooSmall(f"{_why(group)}; importing torch alone takes {format_bytes(TORCH)}", needed_bytes=TORCH)


def guard_ram() -> None:
    """Watch this process's control groups from now on, in a thread of its own, if it may start one."""
    if not GROUPS.is_dir():
        return
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_watch, name="tightfit RAM guard", daemon=True).start()


def _watch() -> None:
    while True:
        group = group_memory()
        left = LONGEST * FASTEST if group is None else group.free - LEAST
        if group is not None and left < 0:
            end_process(BudgetTooSmall.exit_code, "BudgetTooSmall", _why(group))
        time.sleep(min(max(left / FASTEST, 0.002), LONGEST))


def _why(group: GroupMemory) -> str:
    held = held_bytes()
    return (
        f"out of memory: of the {format_bytes(group.limit)} that this process's control group may hold, "
        f"{format_bytes(max(group.free, 0))} are left. This process holds {format_bytes(held)}, others and the system "
        f"{format_bytes(max(group.used - held, 0))}: raise the limit, or stop what else runs there"
    )
