"""The `thinwire` command: every command is a module of this package."""

import typer

from thinwire.cli.bench import bench
from thinwire.cli.compare import compare
from thinwire.cli.gradients import gradients
from thinwire.cli.lab import lab
from thinwire.cli.methods import methods
from thinwire.cli.mistakes import OneLineErrors
from thinwire.cli.plan import plan
from thinwire.cli.predict import predict
from thinwire.cli.report import report
from thinwire.cli.reproduce import reproduce

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
app.add_typer(bench, name="bench")
bench.command()(predict)
app.command()(reproduce)
app.command()(gradients)
