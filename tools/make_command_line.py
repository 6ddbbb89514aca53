"""The command line's own help → docs/command-line.md.

python tools/make_command_line.py          # write it
python tools/make_command_line.py --check  # exit 1 if that would change it
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo, CommandInfo

from make_tables import table
from tightfit.cli import app

PAGE = Path(__file__).parent.parent / "docs/command-line.md"
HEAD = """# Command line

`tightfit COMMAND`, or `python -m tightfit COMMAND`. Progress goes to stderr, results to stdout; with `--json` the last
line of stdout is one JSON object. Errors are one line.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 2 | illegal input: an unknown name, a file that is missing or damaged, a request that the pipeline does not take |
| 3 | it does not fit, or a control group has no memory left: the message has the bytes |
| 1 | anything else |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C, SIGTERM: one line, no unfinished file |
"""


KINDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def page() -> str:
    return "\n".join([HEAD, *map(_command, app.registered_commands)])


def _command(command: CommandInfo) -> str:
    assert command.callback is not None
    summary, _, rest = str(command.help).strip().partition("\n")
    examples = "\n".join(line.strip() for line in rest.splitlines() if line.startswith("  "))
    notes = re.sub(r"Examples:|\n  .*", "", rest).strip()
    hints = get_type_hints(command.callback, include_extras=True)
    rows = [_row(name, hint) for name, hint in hints.items() if name != "return"]
    name = command.name or command.callback.__name__
    return (
        "\n\n".join((f"## {name}", summary, f"```\n{examples}\n```", notes, table(("option", "meaning"), rows))) + "\n"
    )


def _row(name: str, hint: Any) -> tuple[str, str]:
    kind, info = get_args(hint)
    if isinstance(info, ArgumentInfo):
        return f"`{info.metavar or name.upper()}`", info.help or ""
    given = [info.default, *(info.param_decls or ())]  # typer keeps the first of the option's own names as its default
    words = [word for word in given if isinstance(word, str) and word.startswith("--")]
    word = words[0] if words else f"--{name.replace('_', '-')}"
    kinds = [*(get_args(kind) or (kind,))]
    value = "" if bool in kinds else f" {info.metavar or KINDS[(get_args(kinds[0]) or kinds)[0]]}"
    return f"`{word}{value}`", info.help or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = not PAGE.exists() or PAGE.read_text() != page()
    if stale and check:
        print("docs/command-line.md is not what --help says: run tools/make_command_line.py")
    elif stale:
        PAGE.write_text(page())
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
