"""docs/guides/troubleshooting.md quotes messages that the source has, and names every class of errors."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from thinwire import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/troubleshooting.md").read_text()


def texts(path: Path) -> list[str]:
    """The strings of a module; what is filled in is a gap."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@cache
def source() -> str:
    """All strings of the package."""
    return "\n".join(text for path in (ROOT / "src/thinwire").rglob("*.py") for text in texts(path))


def quoted() -> list[str]:
    """The first column of the tables of messages."""
    found, inside = [], False
    for line in PAGE.splitlines():
        if line.startswith("| message |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            found.append(line.split(" | ")[0].removeprefix("| "))
    return found


MESSAGES = [message for message in quoted() if not message.startswith("all others")]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message: str) -> None:
    """Between the braces; short pieces say too little to be looked for."""
    pieces = [piece.strip(" ,;:?") for piece in re.split(r"\{\w+\}|\.\.\.", message)]
    long = [piece for piece in pieces if len(piece) > 8]
    assert long, message
    for piece in long:
        assert piece in source(), f"{message!r}: {piece!r}"


def test_every_class_of_errors_is_explained() -> None:
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert len(classes) > 5
    for name in classes:
        assert re.search(rf"^\| `(thinwire\.errors\.)?{name}`", PAGE, re.MULTILINE), name
    assert len(MESSAGES) > 40
