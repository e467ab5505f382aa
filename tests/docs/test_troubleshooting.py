"""docs/guides/troubleshooting.md quotes messages that the source has, by the class that it raises."""

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
    """The strings of a module."""
    return strings_of(ast.parse(path.read_text()))


def strings_of(tree: ast.AST) -> list[str]:
    """Those in a part of it; what is filled in is a gap."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


CLASSES = [name for name, value in vars(errors).items() if inspect.isclass(value)]


@cache
def source() -> dict[str, tuple[str, str]]:
    """By class: the strings with which it is made, and those of all modules that name it."""
    made: dict[str, list[str]] = {name: [] for name in CLASSES}
    near: dict[str, list[str]] = {name: [] for name in CLASSES}
    for path in (ROOT / "src/thinwire").rglob("*.py"):
        tree, strings = ast.parse(path.read_text()), texts(path)
        for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(CLASSES):
            near[name] += strings
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made:
                made[node.func.id] += strings_of(node)
    return {name: ("\n".join(made[name]), "\n".join(near[name])) for name in CLASSES}


@cache
def everywhere() -> list[str]:
    """The strings of every module."""
    return ["\n".join(texts(path)) for path in (ROOT / "src/thinwire").rglob("*.py")]


def quoted() -> list[tuple[str, str]]:
    """The first column of the tables of messages, with the class of the section or the one in front."""
    found, section, inside = [], "", False
    for line in PAGE.splitlines():
        if line.startswith("## "):
            section = line.strip("# `")
        if line.startswith("| message |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            message = line.split(" | ")[0].removeprefix("| ")
            other = re.match(r"`(\w+Error)`: ", message)
            found.append((other[1], message[other.end() :]) if other else (section, message))
    return found


MESSAGES = [(name, message) for name, message in quoted() if not message.startswith("all others")]


@pytest.mark.parametrize(("name", "message"), MESSAGES)
def test_a_message_is_in_the_source(name: str, message: str) -> None:
    """Between the braces; short pieces say too little to be looked for.

    A piece in a call of a class belongs to that class. Others are put together elsewhere, but not all pieces
    of a message are far from its class.
    """
    pieces = [piece.strip(" ,;:?") for piece in re.split(r"\{\w+\}|\.\.\.", message)]
    long = [piece for piece in pieces if len(piece) > 8]
    assert long, message
    for piece in long:
        raised = {each for each, (made, _) in source().items() if piece in made}
        assert name in raised or not raised, f"{message!r}: {piece!r} is of {raised}"
        assert any(piece in text for text in everywhere()), f"{message!r}: {piece!r}"
    assert any(piece in source()[name][1] for piece in long), f"{message!r} is of no module with {name}"


def test_every_class_of_errors_is_explained() -> None:
    assert len(CLASSES) > 5
    for name in CLASSES:
        assert re.search(rf"^\| `(thinwire\.errors\.)?{name}`", PAGE, re.MULTILINE), name
    assert len(MESSAGES) > 40


def test_every_row_has_a_header() -> None:
    """Rows after an empty line are no table any more."""
    for rows in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        assert rows.splitlines()[1].startswith("|---"), rows
