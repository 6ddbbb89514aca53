"""`python -m tightfit` is `tightfit`."""

from tightfit.cli import app

if __name__ == "__main__":
    app(prog_name="tightfit")
