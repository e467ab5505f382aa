"""`thinwire gradients`, run as a user runs it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.tools.cli import app


def test_gradients_makes_a_table_a_page_and_json(tmp_path: Path):
    page, record = tmp_path / "plots" / "g.html", tmp_path / "g.json"
    arguments = ["gradients", "--steps", "6", "--ratio", "0.02", "--out", str(page), "--json", str(record)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Gaussian" in result.output
    assert "4 of 4" in result.output
    found = json.loads(record.read_text())
    assert len(found["steps"]) == 6
    assert len(found["phases"]) == 4
    assert sum(phase["total"] for phase in found["phases"]) == 6 * 2 * found["gradient_bytes"] // 4
    for step in found["steps"]:
        assert step["learned"] == pytest.approx(step["real"], rel=0.2)
        assert step["gaussian"] > 0
        assert step["laplace"] > 0
    assert found["histogram_bytes"] < 5000
    html = page.read_text()
    assert "Plotly.react(" in html
    assert "<script src=" not in html
    assert "Laplace" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "2"], "ratio must be between"),
        (["--model", "lstm"], "lstm learns text"),
        (["--model", "none"], "models are"),
        (["--data", "mnist"], "data is digits"),
        (["--lr", "-1"], "learning rate"),
        (["--method", "tpk"], "did you mean"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, tmp_path: Path):
    result = CliRunner().invoke(app, ["gradients", "--out", str(tmp_path / "g.html"), *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_training_that_breaks_down_is_told(tmp_path: Path):
    arguments = ["gradients", "--steps", "5", "--lr", "1e30", "--out", str(tmp_path / "g.html")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "smaller learning rate" in result.output
