"""Who imports whom in `src/thinwire`, read from the source: also imports inside functions and for typing."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

# A module imports from its own layer and from those above it, never from below.
LAYERS = (
    ("errors", "log", "version"),
    ("net",),
    ("core",),
    ("kernels",),
    ("drivers",),
    ("methods",),
    ("averaging",),
    ("distributions",),
    ("sessions",),
    ("optim",),
    ("predict",),
    ("hosts",),
    ("integrations",),
    ("server",),
    ("convex",),
    ("tools",),
)
# The package itself is what users import: it may name every layer but the tools.
FACE = ("__init__", "__main__")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found: dict[str, Path] = {}
    for path in sorted((SOURCE / "thinwire").rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 2:
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The thinwire modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
    return {name for name in found if name.partition(".")[0] == "thinwire"}


def room(module: str) -> str:
    """The part of the house that a module is in: the package or the module below `thinwire`."""
    return module.split(".")[1] if "." in module else "__init__"


def level(module: str) -> int:
    """Which layer a module is in; the face of the package comes last."""
    where = room(module)
    for number, rooms in enumerate(LAYERS):
        if where in rooms:
            return number
    if where in FACE:
        return len(LAYERS)
    raise AssertionError(f"{module} is in no layer: add {where!r} to LAYERS and to docs/architecture.md")
