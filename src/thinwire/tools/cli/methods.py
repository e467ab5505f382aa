"""`thinwire methods`."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import AsJson, console, errors, print_json, table

if TYPE_CHECKING:
    from thinwire.tools.catalogue.descriptions import Description


def methods(
    name: Annotated[str, typer.Argument(help="Only this method, in full.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the methods: options with their defaults, guarantees, bytes and reference."""
    from thinwire.tools.catalogue.descriptions import all_methods

    with errors():
        described = all_methods()
        if name:
            described = [_one(name, described)]
    if as_json:
        print_json(described)
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
            one.guarantees,
            one.bytes,
            one.reference or "-",
        )
        for one in described
    ]
    header = ("name", "options", "guarantees", "bytes per step (n entries, k sent)", "reference")
    table("methods; see `thinwire methods NAME` for more", header, rows, numbers=False)


def _show(one: Description) -> None:
    out = console()
    facts = {"guarantees": one.guarantees, "limits": one.limits, "bytes per step": one.bytes}
    for line in (one.call, "", *(f"{name}: {text}" for name, text in facts.items()), "", one.text):
        out.print(line, markup=False)
    if one.family:
        out.print(f"\nThe family: {one.family}", markup=False)
