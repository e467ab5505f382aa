"""`thinwire methods`."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import console, errors, table

if TYPE_CHECKING:
    from thinwire.tools.catalogue.descriptions import Description


def methods(
    name: Annotated[str, typer.Argument(help="Only this one, with everything there is to say.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the methods: options with their defaults, what may be relied on, bytes and reference."""
    from thinwire.tools.catalogue.descriptions import all_methods

    with errors():
        described = all_methods()
        if name:
            described = [_one(name, described)]
    if as_json:
        console().print_json(json.dumps([asdict(one) for one in described]))
    elif name:
        _show(described[0])
    else:
        _list(described)


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
