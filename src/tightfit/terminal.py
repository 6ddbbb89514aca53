"""Status, log and errors of a command on stderr. An error is one line and sets the exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import typer

from tightfit.devices.ram import held_bytes
from tightfit.devices.ram_guard import check_ram
from tightfit.errors import RunError, TightfitError
from tightfit.progress import listening
from tightfit.run.launched_ranks import rank_here
from tightfit.units import format_bytes, format_seconds

__all__ = ["errors_as_lines", "log_to_stderr", "quiet_transformers", "say", "showing_steps"]

NO_THREAD = "can't start new thread"  # a RuntimeError of Python
LONGEST_WORD, LONGEST = 250, 2000  # characters of a word, and of an error's line


@contextlib.contextmanager
def say(what: str) -> Iterator[None]:
    """Show `what` as a status on stderr, with the time left where that is known, if stderr is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …") as status:

        def on_progress(_: float, left: float) -> None:
            status.update(f"{what} … about {format_seconds(left)} left")

        with listening(on_progress):
            yield


@contextlib.contextmanager
def showing_steps() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (step name, steps done, total steps) that shows a bar with the time left on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total, visible=True)


@contextlib.contextmanager
def log_to_stderr(wanted: bool) -> Iterator[None]:
    """Write tightfit's log to stderr, one line per call, if `wanted`."""
    logger, handler = logging.getLogger("tightfit"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    level = logger.level
    if wanted:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' warnings. Those of diffusers are shown: they report changes to the request."""
    from transformers.utils import logging as library

    level = library.get_verbosity()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)


@contextlib.contextmanager
def errors_as_lines(as_json: bool) -> Iterator[None]:
    """End the command with one line on stderr and the matching exit code, whatever is raised.

    Nothing is said if the reader of stdout, `head` for example, has gone: only the last lines were for it.
    """
    try:
        check_ram()
        yield
    except TightfitError as error:
        raise _ended(error, str(error), error.exit_code, as_json, error.facts) from error
    except BrokenPipeError:
        _give_up_stdout()
    except Exception as error:
        if found := _explained(error):
            raise _ended(found, str(found), found.exit_code, as_json, found.facts) from error
        raise _ended(error, f"{type(error).__name__}: {error}", 1, as_json) from error


def _give_up_stdout() -> None:
    """Let stdout lead nowhere: what is still to be written would fail again at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _explained(error: Exception) -> TightfitError | None:
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        threads = threading.active_count()
        return RunError(f"this process has {threads} threads and may start no more: raise its limit (ulimit -u)")
    if isinstance(error, MemoryError):
        held = format_bytes(held_bytes())
        return RunError(f"this process holds {held} and gets no more memory: raise its limits (ulimit -v, -d)")
    if "diffusers" not in sys.modules:  # no pipeline was called
        return None
    from tightfit.run.call_errors import explained

    return explained(error)


def _ended(
    error: BaseException, message: str, code: int, as_json: bool, facts: dict[str, Any] | None = None
) -> typer.Exit:
    message, rank, facts = _shortened(" ".join(message.split())), rank_here(), facts or {}
    if rank.rank == 0:
        typer.secho(f"tightfit: {message}", err=True, fg="red")
    elif code == 1 and "ended_by" not in facts:  # else its own rank says it
        typer.secho(f"tightfit: rank {rank.rank}: {message.removeprefix(f'rank {rank.rank}: ')}", err=True, fg="red")
    elif code == 1 and rank.speaks_after(facts.get("ended")):
        typer.secho(f"tightfit: {message}", err=True, fg="red")
    if as_json and rank.rank == 0:
        known = {name: _shortened(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message, **known}}, default=str))
    return typer.Exit(code)


def _shortened(text: str) -> str:
    """`text` with words of more than LONGEST_WORD characters cut in the middle, and at most LONGEST characters."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:100]}…{word[0][-40:]}", text)
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
