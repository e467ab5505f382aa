"""`thinwire methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.show import AsJson, console, errors, print_json, table

if TYPE_CHECKING:
    from thinwire.tools.catalogue.descriptions import Description


def methods(
    name: Annotated[str, typer.Argument(help="Only this method, in full.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the methods: options with their defaults, guarantees, bytes and reference."""
    with errors():
        from thinwire.methods.registry import parse
        from thinwire.tools.catalogue.descriptions import all_methods, describe

        described = [describe(type(parse(name)))] if name else all_methods()
    if as_json:
        print_json(described)
    elif name:
        _show(described[0])
    else:
        _list(described)


def _list(described: list[Description]) -> None:
    rows = [
        (one.name, one.defaults or "-", one.guarantees, one.bytes, one.reference or "-") for one in described
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
