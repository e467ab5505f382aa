"""The `thinwire` command: every command is a module of this package."""

from typing import Annotated

import typer

from thinwire.tools.cli.compare import compare
from thinwire.tools.cli.gradients import gradients
from thinwire.tools.cli.lab import lab
from thinwire.tools.cli.methods import methods
from thinwire.tools.cli.plan import plan
from thinwire.tools.cli.report import report
from thinwire.tools.cli.run import run
from thinwire.tools.cli.study import study
from thinwire.tools.cli.usage_errors import OneLineErrors
from thinwire.version import __version__

HELP = "Train PyTorch models over thin wires: the same accuracy for a small part of the bytes."

app = typer.Typer(
    cls=OneLineErrors,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """What all commands have in common."""


# All that follows the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(compare)
app.command()(report)
app.command()(plan)
app.command()(methods)
app.add_typer(lab, name="lab")
app.command()(gradients)
app.command()(study)
