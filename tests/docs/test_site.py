"""Public names have docstrings, and the site that `make docs` builds has them all."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from thinwire.hosts.auto import AutoSession
from thinwire.sessions.base import BaseSession
from thinwire.sessions.gradient import Session
from thinwire.sessions.histogram import Histogram
from thinwire.sessions.periodic import PeriodicSession

ROOT = Path(__file__).parents[2]
MODULES = ("thinwire", "thinwire.methods", "thinwire.averaging", "thinwire.core", "thinwire.server")
MODULES += ("thinwire.convex", "thinwire.distributions")
# Of methods and schedules users see options, which the docstrings of the classes explain.
WITHOUT_MEMBERS = ("thinwire.methods", "thinwire.averaging")
SESSIONS = (BaseSession, Session, PeriodicSession, AutoSession, Histogram)


def public() -> Iterator[tuple[str, object]]:
    """Every public name and what it stands for."""
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            if name != "__version__":
                yield f"{module}.{name}", getattr(importlib.import_module(module), name)
    for cls in SESSIONS:
        yield f"{cls.__module__}.{cls.__qualname__}", cls


NAMES = dict(public())


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Its public methods and properties, with those that it inherits from thinwire."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        owner = next((c for c in cls.__mro__ if name in vars(c)), cls)
        kinds = (property, functools.cached_property, staticmethod, classmethod)
        ours = name[0] != "_" and owner.__module__.startswith("thinwire")
        if ours and (isinstance(value, kinds) or inspect.isfunction(value)):
            yield name, getattr(cls, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name: str) -> None:
    found = NAMES[name]
    assert inspect.getdoc(found), name
    if inspect.isclass(found):
        # A dataclass without a docstring gets its signature as one.
        assert not str(found.__doc__).startswith(f"{found.__name__}("), name
    if isinstance(found, ModuleType):
        for each, function in vars(found).items():
            if inspect.isfunction(function) and each[0] != "_":
                assert function.__doc__, f"{name}.{each}"


@pytest.mark.parametrize(
    "name", [n for n, f in NAMES.items() if inspect.isclass(f) and not n.startswith(WITHOUT_MEMBERS)]
)
def test_every_public_member_has_a_docstring(name: str) -> None:
    without = [member for member, value in members(NAMES[name]) if not inspect.getdoc(value)]
    assert not without, f"{name}: {', '.join(without)}"


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocstrings import Inventory

    built = build(tmp_path)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    with (tmp_path / "objects.inv").open("rb") as stream:
        documented = set(Inventory.parse_sphinx(stream))
    assert set(NAMES) <= documented, sorted(set(NAMES) - documented)
    for name in ("average", "meter", "metrics", "state_dict", "load_state_dict", "detach"):
        assert f"thinwire.Session.{name}" in documented
    # Nothing is fetched when a page is opened, either.
    for page in tmp_path.rglob("*.html"):
        assert "fonts.googleapis" not in page.read_text(), page
    assert "thinwire.__version__" in (tmp_path / "api/index.html").read_text()
