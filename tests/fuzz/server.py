"""Commands of `tightfit`, each in a forked child of this process, which has imported all of it once.

A child has an address space, a time and a folder of its own, and is ended with all that it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

__all__ = ["Outcome", "run_command"]

ROOM = 2 * 10**9  # bytes of address space for a command, beside what is loaded
SECONDS = 60.0
_LOADED = (
    "tightfit.cli", "tightfit.run.job", "tightfit.run.predict", "tightfit.run.simulate", "tightfit.report.timeline",
    "tightfit.run.calibration", "tightfit.run.progress", "diffusers.pipelines.stable_diffusion", "matplotlib.pyplot",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int  # -9: killed, by the time limit if `late`
    out: str
    err: str
    seconds: float
    peak: int  # bytes of memory, with what is loaded
    late: bool


def run_command(words: Sequence[str], folder: Path) -> Outcome:
    """Run `tightfit WORDS` in `folder`, and say how it ended."""
    for name in _LOADED:
        import_module(name)
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_code_of(words, folder))
        handle = os.pidfd_open(child)
        late = not select.select([handle], [], [], SECONDS)[0]
        os.close(handle)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        texts = [os.pread(stream.fileno(), 10**6, 0).decode(errors="backslashreplace") for stream in (out, err)]
    code, peak = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
    return Outcome(code, *texts, time.monotonic() - began, peak, late)


def _code_of(words: Sequence[str], folder: Path) -> int:
    """The exit code of the command, which is run in this process."""
    try:
        os.chdir(folder)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        import_module("tightfit.cli").app([*words], prog_name="tightfit")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code
