"""`thinwire methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.show import AsJson, console, errors, print_json, table

if TYPE_CHECKING:
    from thinwire.tools.catalogue.descriptions import Description


def methods(
    name: Annotated[str, typer.Argument(help="The method to show in full.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the methods, or show one in full: options, guarantees, cost and reference."""
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
    rows = [(one.name, one.summary, one.bytes) for one in described]
    header = ("name", "what it does", "bytes per step (n entries, k sent)")
    table("methods; `thinwire methods NAME` shows one in full", header, rows, numbers=False)


def _show(one: Description) -> None:
    out = console()
    facts = {"guarantees": one.guarantees, "limits": one.limits, "bytes per step": one.bytes}
    facts |= {"reference": one.reference or "-"}
    for line in (one.call, "", *(f"{name}: {text}" for name, text in facts.items()), "", one.text):
        out.print(line, markup=False)
    if one.family:
        out.print(f"\nThe family: {one.family}", markup=False)
