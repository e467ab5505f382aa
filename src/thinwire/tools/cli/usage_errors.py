"""How commands end: a usage error and a signal are one line, not a page of usage or a traceback."""

from __future__ import annotations

import signal
import sys
from typing import Any, cast

import typer
from typer.core import TyperGroup

from thinwire.tools.lab.signals import leaving_by


class OneLineErrors(TyperGroup):
    """Commands that report wrong options and arguments like a `ConfigError`: one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            with leaving_by(signal.SIGTERM, signal.SIGHUP):
                code = super().main(*args, standalone_mode=False, **extra)
        except typer.Abort:
            typer.echo("thinwire: stopped", err=True)
            sys.exit(1)
        except Exception as error:
            # By their method: newer releases of typer bring the classes with them, older ones do not.
            if not hasattr(error, "format_message"):
                raise
            usage = cast(Any, error)
            if type(error).__name__ == "NoArgsIsHelpError":
                usage.show()
            else:
                message = " ".join(usage.format_message().split()).rstrip(".")
                context = getattr(usage, "ctx", None)
                command = "thinwire" if context is None else context.command_path
                typer.echo(f"thinwire: {message} (see {command} --help)", err=True)
            sys.exit(getattr(usage, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)
