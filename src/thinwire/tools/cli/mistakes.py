"""A mistake on the command line is one line that says what to do, not a page of usage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import typer
from typer.core import TyperGroup


class OneLineErrors(TyperGroup):
    """Commands whose wrong options and arguments are told like `ConfigError`: a line and exit code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        def run() -> Any:
            return super(OneLineErrors, self).main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )

        if not standalone_mode:
            return run()
        try:
            code = run()
        except typer.Abort:
            typer.echo("thinwire: stopped", err=True)
            sys.exit(1)
        except Exception as error:
            # By what they can do: newer releases of typer bring the classes with them, older ones do not.
            message = cast("Callable[[], str] | None", getattr(error, "format_message", None))
            if message is None:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                cast(Any, error).show()
            else:
                typer.echo(f"thinwire: {_sentence(message())} ({_path(error)} --help tells more)", err=True)
            sys.exit(cast(int, getattr(error, "exit_code", 2)))
        sys.exit(code if isinstance(code, int) else 0)


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _path(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return "thinwire" if context is None else str(context.command_path)
