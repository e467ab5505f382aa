"""What people copy: every snippet gives the optimizer, and where AdamW trains its method is one for AdamW."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.docs.pages import PAGES, ROOT
from thinwire import parse
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Optimizers
from thinwire.sessions.optimizer_checks import check_optimizers

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = sorted((ROOT / "src/thinwire").rglob("*.py"))
# The first pages that people read, and the frameworks, whose default is AdamW.
FIRST = [ROOT / name for name in ("README.md", "examples/README.md")]
FIRST += [ROOT / "docs" / name for name in ("index.md", "getting-started.md", "guides/frameworks.md")]
FIRST += [ROOT / "docs/guides/scripts.md", ROOT / "src/thinwire/tools/cli/run.py"]
FIRST += [ROOT / "src/thinwire" / name for name in ("__init__.py", "hosts/attach.py", "sessions/gradient.py")]
FIRST += sorted((ROOT / "src/thinwire/integrations").glob("*.py"))
FIRST += [path for path in EXAMPLES if "AdamW" in path.read_text()]


def snippets(path: Path) -> str:
    """A page, an example, or the docstrings of a module."""
    text = path.read_text()
    if path not in MODULES:
        return text
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def calls(path: Path) -> list[ast.Call]:
    """The lines that attach a method, in a diff as well."""
    found: list[ast.Call] = []
    for line in snippets(path).splitlines():
        with suppress(SyntaxError):
            tree = ast.parse(line.strip().removeprefix("+").strip())
            found += [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node)]
    return found


def name_of(call: ast.Call) -> str:
    name = ast.unparse(call.func).rpartition(".")[2]
    return name if name in ("attach", "Session", "ThinwireCallback") else ""


def gives_the_optimizer(call: ast.Call) -> bool:
    """ThinwireCallback finds it; the one of Accelerate takes it as the fourth argument."""
    named = any(keyword.arg == "optimizer" for keyword in call.keywords)
    return named or name_of(call) == "ThinwireCallback" or len(call.args) == 4


def methods(path: Path) -> list[str]:
    """Those that are attached, and those of a command line."""
    texts = [arg.value for call in calls(path) for arg in call.args if isinstance(arg, ast.Constant)]
    return texts + re.findall(r'--method[" ](?:, default=)?"([^"]+)"', path.read_text())


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_snippet_gives_the_optimizer(path: Path) -> None:
    assert [ast.unparse(call) for call in calls(path) if not gives_the_optimizer(call)] == []


@pytest.mark.parametrize("path", FIRST, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_shown_first_trains_well_with_adamw(path: Path) -> None:
    """`attach` warns of the others: some end behind a worker that never communicates."""
    adamw = Optimizers(torch.optim.AdamW([torch.zeros(64, 64)], fused=True))
    for text in methods(path):
        method = None if text == "auto" else parse(text)
        assert not isinstance(method, Exchange) or check_optimizers([method], adamw) == [], text


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_auto_is_never_shown_without_the_optimizer(path: Path) -> None:
    shown = re.findall(r'attach\((?:accelerator, )?model, "auto"[^)]*\)', path.read_text())
    assert [call for call in shown if "optimizer" not in call] == []


def test_the_pages_show_methods() -> None:
    assert sum(len(calls(path)) for path in PAGES) > 50
    assert sum(bool(methods(path)) for path in FIRST) > 10
    assert any("adam" in text for path in FIRST for text in methods(path))
