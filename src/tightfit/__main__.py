"""Entry point of `python -m tightfit` and of the command `tightfit`. Signals are handled before all other imports."""

import contextlib
import io
import sys

from tightfit.signals import end_on_signals, ignore_signals

__all__ = ["main"]


class _Lenient(io.TextIOWrapper):
    """Text that is lost where it cannot be written: on a full disk, or if nobody reads it any more."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _prepare_streams() -> None:
    """Let what a stream cannot encode be shown as a question mark, and what stderr cannot take be lost."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = _Lenient(sys.stderr.detach(), encoding=encoding, errors="replace", line_buffering=True)


def main() -> None:
    """Run the command line."""
    end_on_signals()
    _prepare_streams()
    from tightfit.devices.ram_guard import guard_ram

    guard_ram()
    from tightfit.cli import app

    try:
        app(prog_name="tightfit")
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
