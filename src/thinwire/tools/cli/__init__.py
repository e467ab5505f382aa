"""The `thinwire` command: every command is a module of this package."""

import typer

from thinwire.tools.cli.compare import compare
from thinwire.tools.cli.gradients import gradients
from thinwire.tools.cli.lab import lab
from thinwire.tools.cli.methods import methods
from thinwire.tools.cli.plan import plan
from thinwire.tools.cli.report import report
from thinwire.tools.cli.usage_errors import OneLineErrors

HELP = "Train PyTorch models over thin wires: the same accuracy for a small part of the bytes."

app = typer.Typer(
    cls=OneLineErrors,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback(help=HELP)
def main() -> None:
    """What all commands have in common: nothing yet."""


app.command()(compare)
app.command()(report)
app.command()(plan)
app.command()(methods)
app.add_typer(lab, name="lab")
app.command()(gradients)
