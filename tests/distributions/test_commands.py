"""`thinwire gradients`, run as a user runs it."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from thinwire.tools.cli import app
from thinwire.tools.gradients.fits import FAMILIES


def test_gradients_makes_a_table_a_page_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    page, record = tmp_path / "plots" / "g.html", tmp_path / "g.json"
    arguments = ["gradients", "--steps", "6", "--ratio", "0.02", "--out", str(page), "--json", str(record)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Gaussian" in result.output
    assert "4 of 4" in result.output
    found = json.loads(record.read_text())["mlp"]
    assert len(found["steps"]) == 6
    assert len(found["phases"]) == 4
    assert sum(phase["total"] for phase in found["phases"]) == 6 * 2 * found["gradient_bytes"] // 4
    for step in found["steps"]:
        assert step["learned"] == pytest.approx(step["real"], rel=0.2)
        assert step["gaussian"] > 0
        assert step["laplace"] > 0
    assert found["histogram_bytes"] < 5000
    assert [fit["family"] for fit in found["fits"]] == list(FAMILIES)
    assert all(0 < fit["distance"] < 1 for fit in found["fits"])
    assert len(found["losses"]) == 4
    assert all(0 < loss["worst"] < 1 for loss in found["losses"])
    assert "KS distance" in result.output
    assert "(1 - k/d)^2" in result.output
    html = page.read_text()
    assert "Plotly.react(" in html
    assert "<script src=" not in html
    assert "Laplace" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "2"], "ratio must be between"),
        (["--model", "lstm", "--data", "digits"], "lstm learns text"),
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


def test_several_models_make_one_page_and_pictures(tmp_path: Path):
    page, pictures = tmp_path / "g.html", tmp_path / "pictures"
    arguments = ["gradients", "--model", "logistic,transformer", "--steps", "2", "--batch", "4"]
    arguments += ["--method", "topk(ratio=0.001)", "--ratio", "0.001", "--pictures", str(pictures)]
    arguments += ["--out", str(page)]
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    shown, _, place = result.output.partition("Plots: ")
    assert place.strip() == str(page)
    assert max(map(len, shown.splitlines())) <= 100
    for model in ("logistic", "transformer"):
        assert f"{model}, Student t" in shown
        assert f"{model}: what top-k loses" in page.read_text()
    drawn = {path.name: path.read_text() for path in pictures.iterdir()}
    assert len(drawn) == 11
    for text in drawn.values():
        ElementTree.fromstring(text)
    for name, words in (
        ("transformer-gradient-magnitudes-and-fits", "Student t"),
        ("all-models", "(1 - k/d)^2"),
    ):
        assert any(file.startswith(name) and words in text for file, text in drawn.items())


def test_residuals_are_studied_with_the_gradients(tmp_path: Path):
    """A residual grows as long as little is sent, so what top-k selects from does."""
    deviations = {}
    for method in ("dense", "topk(ratio=0.001)"):
        record = tmp_path / "g.json"
        arguments = ["gradients", "--steps", "8", "--lr", "1e-4", "--method", method, "--json", str(record)]
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "g.html")])
        assert result.exit_code == 0, result.output
        phases = json.loads(record.read_text())["mlp"]["phases"]
        deviations[method] = phases[-1]["deviation"] / phases[0]["deviation"]
    assert deviations["dense"] < 1.5
    assert deviations["topk(ratio=0.001)"] > 2


def test_a_training_that_breaks_down_is_told(tmp_path: Path):
    arguments = ["gradients", "--steps", "5", "--lr", "1e30", "--out", str(tmp_path / "g.html")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "smaller learning rate" in result.output
