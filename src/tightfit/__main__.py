"""Entry point of `python -m tightfit`, the same as the command `tightfit`."""

from tightfit.cli import app

if __name__ == "__main__":
    app(prog_name="tightfit")
