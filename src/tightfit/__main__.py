"""Entry point of the command `tightfit`, and of `python -m tightfit`."""

import contextlib
import io
import sys

from tightfit.cli import app

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


def main() -> None:
    """Run the command line. What a stream cannot encode is shown as a question mark; stderr never ends a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = _Lenient(sys.stderr.detach(), encoding=encoding, errors="replace", line_buffering=True)
    app(prog_name="tightfit")


if __name__ == "__main__":
    main()
