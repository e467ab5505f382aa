"""The way of one gradient is short, and the architecture page names its stops."""

from __future__ import annotations

from tests.architecture.imports import ROOT
from tests.architecture.walk import files


def test_a_reader_opens_at_most_fifteen_files() -> None:
    found = [name for name in files() if not name.startswith("kernels")]
    assert "methods/topk.py" in found
    assert len(found) <= 15, found
    page = (ROOT / "docs/architecture.md").read_text()
    assert not [name for name in found if f"`{name}`" not in page]
