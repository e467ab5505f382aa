"""The house: every module in a layer, no import from below, no cycles, and a page that says so."""

from __future__ import annotations

from functools import cache

import pytest

from tests.architecture.imports import LAYERS, ROOT, SOURCE, imports, level, modules, room

pytestmark = pytest.mark.quick
MODULES = modules()


@cache
def graph() -> dict[str, set[str]]:
    """Who imports whom: read when the first test asks for it, not when tests are collected."""
    return {name: imports(path, MODULES) for name, path in MODULES.items()}


def test_a_layer_imports_only_from_itself_and_from_above() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if level(other) > level(module)
    ]
    assert not wrong, wrong


def test_packages_have_no_cycles() -> None:
    rooms = {room(module): set[str]() for module in graph()}
    for module, others in graph().items():
        rooms[room(module)] |= {room(other) for other in others if room(other) != room(module)}
    done: set[str] = set()
    while rooms.keys() - done:
        free = {name for name in rooms.keys() - done if rooms[name] <= done}
        assert free, f"these import each other in a circle: {sorted(rooms.keys() - done)}"
        done |= free


def test_few_modules_stand_beside_the_packages() -> None:
    beside = [path.name for path in (SOURCE / "thinwire").glob("*.py")]
    assert len(beside) <= 5, sorted(beside)


def test_nothing_in_the_package_needs_the_repository() -> None:
    for path in MODULES.values():
        text = path.read_text()
        assert "import benchmarks" not in text, path
        assert "from benchmarks" not in text, path
        assert "import reproductions" not in text, path
        assert "from reproductions" not in text, path


def test_a_wrong_import_would_be_found() -> None:
    assert level("thinwire.net.frames") < level("thinwire.core.channel") < level("thinwire.methods.topk")
    assert level("thinwire.methods.topk") < level("thinwire.hosts.ddp") < level("thinwire.tools.cli")
    assert "thinwire.net.frames" in graph()["thinwire.core.channel"]


def test_the_architecture_page_names_every_layer() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [
        name for layer in LAYERS for name in layer if f"`{name}" not in page and f" {name}" not in page
    ]
    assert not missing
