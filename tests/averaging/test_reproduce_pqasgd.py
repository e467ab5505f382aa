"""The smoke version of the reproduction: every part runs, and a second run finds its records."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproductions.cli import app
from reproductions.pqasgd import SPEED_UP


def test_the_quick_reproduction_runs_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("plotly")
    arguments = ["pqasgd", "--quick", "--out", str(tmp_path), "--json"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    records = (tmp_path / "pqasgd-quick" / "records.jsonl").read_text()
    found = json.loads((tmp_path / "pqasgd-quick" / "outcome.json").read_text())
    assert len(found["claims"]) == 4
    assert all(claim["holds"] is None for claim in found["claims"]), "a smoke run judges nothing"
    assert [len(table["rows"]) for table in found["tables"]] == [3, 3 * len(SPEED_UP), 10]
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "pqasgd-quick" / "records.jsonl").read_text() == records
