"""`thinwire methods`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.show import console, table


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the page of all methods to this file.")] = None,
    digits: Annotated[Path | None, typer.Option(help="Results for the page, by `demo --json`.")] = None,
) -> None:
    """List the methods: options with their defaults, and what may be relied on."""
    from thinwire.registry import methods as registered
    from thinwire.registry import schedules

    if page is not None:
        from thinwire.pages import methods_page

        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(methods_page(json.loads(digits.read_text()) if digits is not None else None))
        return
    described: list[dict[str, Any]] = []
    for name, cls in registered().items():
        instance = cls()
        described.append(
            {
                "name": name,
                "kind": "exchange",
                "options": instance.options(),
                "traits": asdict(instance.traits),
                "summary": (cls.__doc__ or "").strip().splitlines()[0],
            }
        )
    for name, cls in schedules().items():
        described.append(
            {
                "name": name,
                "kind": "schedule",
                "options": cls().options(),
                "traits": {"consensus": True},
                "summary": (cls.__doc__ or "").strip().splitlines()[0],
            }
        )
    if as_json:
        console().print_json(json.dumps(described))
        return
    rows = [
        (
            one["name"],
            ", ".join(f"{key}={value!r}" for key, value in one["options"].items()) or "-",
            _relied_on(one),
            one["summary"],
        )
        for one in described
    ]
    table("methods", ("name", "options", "traits", ""), rows, numbers=False)


def _relied_on(described: dict[str, Any]) -> str:
    if described["kind"] == "schedule":
        return "consensus after every sync"
    return ", ".join(key for key, value in described["traits"].items() if value is True) or "-"
