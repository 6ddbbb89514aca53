"""Signals that end a command, and what processes that were killed leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit import files
from tightfit.files import PREFIX, replacing
from tightfit.signals import unfinished

NAMED = ["SIGINT", "SIGTERM", "SIGHUP"]


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that handles signals as a command does, and says "ready" when it waits for one."""
    program = f"import sys\nfrom tightfit.signals import *\nend_on_signals()\n{code}"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], name: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a process that gets the signal when it is ready."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
SWALLOWED = """
import gc, weakref
class Node: ...
def forget(_):
    print("ready", flush=True)
    while True: pass
node = Node()
there = weakref.ref(node, forget)
del node
print("it was lost")
"""


@pytest.mark.parametrize("code", [WAIT, SWALLOWED, f"try:\n exec({WAIT!r})\nexcept:\n print('it was lost')"])
@pytest.mark.parametrize("name", NAMED)
def test_one_line_and_the_exit_code_that_shells_use(name: str, code: str) -> None:
    """Also where Python, or a bare except, would swallow an exception."""
    code_of_exit, out, err = ended(started(code), name)
    assert err == f"tightfit: interrupted by {name}: no half-written file is left\n"
    assert (code_of_exit, out) == (128 + getattr(signal, name), "")


def test_with_json_the_last_line_says_so() -> None:
    _, out, _ = ended(started(WAIT, "--json"), "SIGTERM")
    assert json.loads(out) == {
        "error": {"type": "SIGTERM", "message": "interrupted by SIGTERM: no half-written file is left"}
    }


def test_what_was_ignored_stays_ignored() -> None:
    """nohup ignores SIGHUP."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from tightfit.signals import *\n"
        "end_on_signals()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('alive')\n"
        "ignore_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "alive\ndone\n", "")


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.6, 1.0])
def test_while_modules_are_imported(delay: float) -> None:
    """Tracebacks of half-imported modules came before."""
    command = [sys.executable, "-X", "importtime", "-m", "tightfit", "machine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("tightfit.signals" in line for line in process.stderr)  # imported
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert said == ["tightfit: interrupted by SIGINT: no half-written file is left"]
    assert process.returncode == 130


@pytest.mark.slow
def test_at_any_moment(tmp_path: Path) -> None:
    """40 signals to runs, plans and charts; every fifth time the next run must be right (`bench/signals.py`)."""
    script = Path(__file__).parents[1] / "bench" / "signals.py"
    results = tmp_path / "signals.jsonl"
    command = [sys.executable, str(script), "--count", "40", "--results", str(results)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {line.partition(": ")[2] for line in said.splitlines()}
    assert found <= {"clean", "before the first line of tightfit"}, said
    assert len(results.read_text().splitlines()) == 40 + 40 // 5


WRITING = """
import os
from pathlib import Path
from tightfit import files
if "named" in sys.argv:
    del os.O_TMPFILE
with files.replacing(Path(sys.argv[1])) as partial:
    partial.write_bytes(bytes(10**6))
    print("ready", flush=True)
    import time
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["nameless", "named"])
@pytest.mark.parametrize("name", [*NAMED, "SIGKILL"])
def test_half_a_file(name: str, how: str, tmp_path: Path) -> None:
    """Nothing is left of it; where it needs a name, what a killed process leaves is deleted by the next one."""
    target = tmp_path / "fox.png"
    target.write_bytes(b"old")
    process = started(WRITING, str(target), how)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with replacing(tmp_path / "another.png"):  # which is no reason to delete what somebody is writing
        partial = [path.name for path in tmp_path.glob(f"{PREFIX}*")]
        assert len(partial) == (how == "named")
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=60)
    left = {path.name for path in tmp_path.iterdir()} - {"fox.png", "another.png"}
    assert left == (set(partial) if name == "SIGKILL" else set())
    files._sweep.cache_clear()  # the next process
    with replacing(target) as new:
        new.write_bytes(b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"fox.png", "another.png"}
    assert target.read_bytes() == b"new"
    assert not unfinished


KILLED = """
import itertools
import os
import signal
from pathlib import Path
from tightfit import files
if "named" in sys.argv:
    del os.O_TMPFILE
folder = Path(sys.argv[1])

def kill_at(number):
    events = itertools.count()
    def profile(frame, event, _):
        ours = frame.f_code.co_filename == files.__file__
        if ours and event in ("c_call", "c_return", "return") and next(events) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    return profile

number = killed = 0
while killed == number:
    child = os.fork()
    if child == 0:
        sys.setprofile(kill_at(number))
        with files.replacing(folder / "fox.png") as partial:
            partial.write_bytes(b"new" * 1000)
        sys.setprofile(None)
        os._exit(0)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    number += 1
    assert (folder / "fox.png").read_bytes() in (b"old" * 1000, b"new" * 1000), number
    files._sweep.cache_clear()
    with files.replacing(folder / "fox.png") as partial:
        partial.write_bytes(b"old" * 1000)
    assert os.listdir(folder) == ["fox.png"], number
print(killed)
"""


@pytest.mark.parametrize("how", ["nameless", "named"])
def test_killed_at_each_point_of_a_write(how: str, tmp_path: Path) -> None:
    """The old file or the new one is there, whole, and the next write deletes what was left."""
    (tmp_path / "fox.png").write_bytes(b"old" * 1000)
    process = started(KILLED, str(tmp_path), how)
    out, err = process.communicate(timeout=60)
    assert err == ""
    assert int(out) > 20


@pytest.mark.parametrize("lacking", ["O_TMPFILE", "link", "flock"])
def test_file_systems_that_can_do_less(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    if lacking == "O_TMPFILE":
        monkeypatch.delattr(os, lacking)
    else:
        monkeypatch.setattr(fcntl if lacking == "flock" else os, lacking, refuse)
    path = tmp_path / "fox.png"
    (tmp_path / "usual").touch()
    for content in (b"first", b"second"):
        with replacing(path) as partial:
            partial.write_bytes(content)
        assert path.read_bytes() == content
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert {each.name for each in tmp_path.iterdir()} == {"fox.png", "usual"}
