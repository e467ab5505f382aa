"""`thinwire methods`."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.show import console, errors, table
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.descriptions import Description


def methods(
    name: Annotated[str, typer.Argument(help="Only this one, with everything there is to say.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    pages: Annotated[
        Path | None, typer.Option(help="Write a page for each method, and an index, to this folder.")
    ] = None,
    digits: Annotated[
        Path | None, typer.Option(help="Results for the pages, by `bench digits --json`.")
    ] = None,
) -> None:
    """List the methods: options with their defaults, what may be relied on, bytes and reference."""
    from thinwire.descriptions import all_methods

    with errors():
        if digits is not None and pages is None:
            raise ConfigError("--digits is for the pages: give --pages with a folder, too")
        if pages is not None:
            from thinwire.pages import write_pages

            written = write_pages(pages, None if digits is None else _record(digits))
            console().print(f"{len(written)} pages in {pages}", markup=False)
            return
        described = all_methods()
        if name:
            described = [_one(name, described)]
    if as_json:
        console().print_json(json.dumps([asdict(one) for one in described]))
    elif name:
        _show(described[0])
    else:
        _list(described)


def _record(path: Path) -> dict[str, object]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--digits: {path} cannot be read as JSON: {error}") from None
    if not isinstance(record, dict) or "results" not in record:
        raise ConfigError(
            f"--digits: {path} is not what `thinwire bench digits --json` writes: it has no results"
        )
    return record  # pyright: ignore[reportUnknownVariableType]


def _one(name: str, described: list[Description]) -> Description:
    by_name = {one.name: one for one in described}
    found = by_name.get(name.partition("(")[0])
    if found is None:
        close = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.4)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"unknown method {name!r}{hint}; `thinwire methods` lists them")
    return found


def _list(described: list[Description]) -> None:
    rows = [
        (
            one.name,
            ", ".join(f"{key}={value!r}" for key, value in one.options.items()) or "-",
            one.relied_on,
            one.bytes,
            one.reference or "-",
        )
        for one in described
    ]
    header = ("name", "options", "relied on", "bytes a step (n entries, k sent)", "reference")
    table("methods; `thinwire methods NAME` tells more", header, rows, numbers=False)


def _show(one: Description) -> None:
    out = console()
    for line in (one.call, "", f"relied on: {one.relied_on}", f"bytes a step: {one.bytes}", "", one.text):
        out.print(line, markup=False)
    if one.family:
        out.print(f"\nThe family: {one.family}", markup=False)
