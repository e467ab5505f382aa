"""What commands share: options, tables, progress bars, errors, files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError, ThinwireError

if TYPE_CHECKING:
    from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file as JSON, too.")]
Model = Annotated[
    str, typer.Option(help="logistic, mlp, cnn or resnet20 for images; lstm or transformer for text.")
]
Data = Annotated[
    str,
    typer.Option(
        help="digits, mnist:DIR or cifar10:DIR; synthetic or text:FILE (characters), words or words:FILE."
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="The number of worker processes on this machine.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        "-m",
        help='Such as "topk(ratio=0.01),qsgd(bits=4)"; may be given several times. Default: all.',
    ),
]


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # a file or a pipe has room enough
        console.width = 160
    return console


@contextmanager
def errors() -> Generator[None, None, None]:
    """An error is one line, not a traceback: exit code 2 for a usage error, 1 for what fails later."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"thinwire: {error}", err=True)
        raise typer.Exit(2) from None
    except ThinwireError as error:
        typer.echo(f"thinwire: {error}", err=True)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        from thinwire.net.launch import WorkerFailedError

        if not isinstance(error, WorkerFailedError):
            raise
        # The last line of a worker's traceback says what was wrong.
        typer.echo(f"thinwire: a worker failed: {str(error).strip().splitlines()[-1]}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:  # a disk that is full, a folder that has gone
        where = f" {error.filename}" if error.filename else ""
        typer.echo(f"thinwire: {error.strerror or error}{where}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def progress(total: int | None) -> Generator[Callable[..., None], None, None]:
    """Gives `advance(description, count, total=None)`; without a terminal there is no bar."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def advance(description: str, count: int, new_total: int | None = None) -> None:
            bar.update(task, description=description, advance=count, total=new_total or total)

        yield advance


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        # Figures are never cut; a long method string is folded instead, but not to shreds.
        figure = numbers and number > 0
        width = 0 if figure else min(24, max((len(row[number]) for row in rows), default=0))
        table.add_column(
            name,
            justify="right" if figure else "left",
            no_wrap=figure,
            overflow="fold",
            min_width=width if numbers else None,
        )
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_json(record: object) -> None:
    """Dataclasses and msgspec's structs included."""
    import msgspec

    console().print_json(msgspec.json.encode(record).decode())


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written later; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from None


def save(path: Path | None, record: object) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")
