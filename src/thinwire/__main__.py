"""`python -m thinwire`, and so `torchrun -m thinwire`."""

from thinwire.tools.cli import app

app()
