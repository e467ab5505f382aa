"""A program that ends while an exchange is under way exits with 0, and says what became of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failures.exits import SCENARIOS, Scenario

LINE = "the program ends while an exchange is under way: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios at once: they spend their time waiting."""
    root = tmp_path_factory.mktemp("exits")
    subprocess.run([sys.executable, "-m", "tests.failures.exits", str(root)], timeout=400, check=True)
    return root


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_complete_run_exits_with_0(scenario: Scenario, folder: Path) -> None:
    codes = json.loads((folder / "codes.json").read_text())[scenario.name]
    for rank in range(scenario.size):
        out, err = ((folder / scenario.name / f"{rank}.{name}").read_text() for name in ("out", "err"))
        assert codes[str(rank)] == 0, f"rank {rank}: {codes[str(rank)]}\n{err[-2000:]}"
        if scenario.gone(rank):
            continue
        assert out == "complete\n"
        lines = [line for line in err.splitlines() if LINE in line]
        # An exchange that nobody held up may have ended before the program did.
        assert len(lines) <= 1
        if scenario.absent:
            assert len(lines) == 1, err
            assert "its result is dropped" in lines[0]
