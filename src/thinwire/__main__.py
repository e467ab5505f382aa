"""`python -m thinwire`, and so `torchrun -m thinwire`."""

from thinwire.cli import app

app()
