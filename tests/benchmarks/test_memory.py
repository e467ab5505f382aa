"""`python -m benchmarks memory`: bytes of state and of a step, and the table of the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.memory import Row, filled, run

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is the kernel's count")
def test_state_and_peak_of_methods_that_are_easy_to_count() -> None:
    size = 4_000_000
    rows = {row.method: row for row in run(size, ["dense", "topk(ratio=0.01)", "fp16", "diloco(every=8)"])}
    state = {method: round(row.state, 2) for method, row in rows.items()}
    # A float32 residual; an anchor and the outer momentum.
    assert state == {"dense": 0.0, "topk(ratio=0.01)": 4.0, "fp16": 0.0, "diloco(every=8)": 8.0}
    # A 16-bit copy of the gradient, and little else.
    assert 2.0 <= rows["fp16"].peak < 4.0
    assert rows["topk(ratio=0.01)"].peak < 2.0
    assert rows["dense"].peak < 2.0


def test_the_table_replaces_the_one_before() -> None:
    page = "before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n"
    once = filled(page, [Row("dense", 0.0, 0.25)])
    assert "| `dense` | 0.0 | 0.2 |" in once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end of table -->\nafter\n")
    assert filled(once, [Row("dense", 0.0, 0.25)]) == once


def test_the_page_has_a_table() -> None:
    page = (ROOT / "docs/guides/memory.md").read_text()
    table = page.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    assert table.count("\n| `") > 20
