"""`python -m reproductions`."""

from reproductions.cli import app

app(prog_name="python -m reproductions")
