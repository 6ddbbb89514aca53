"""Entry point of `python -m tightfit` and of the command `tightfit`. Signals are handled before all other imports."""

from tightfit.signals import end_on_signals, ignore_signals


def main() -> None:
    end_on_signals()
    from tightfit.devices.ram_guard import guard_ram

    guard_ram()
    from tightfit.cli import app

    try:
        app(prog_name="tightfit")
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
