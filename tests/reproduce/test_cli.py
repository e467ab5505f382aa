"""`python -m reproductions`: a list, one line for a wrong call, and one page of all outcomes."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproductions import NAMES, Context, find
from reproductions.cli import app
from thinwire.errors import ConfigError


def test_unknown_names_and_missing_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gaussiank"):
        find("gausiank")
    with pytest.raises(ConfigError, match="--data"):
        _ = Context("x", data=None, quick=False, out=tmp_path).data
    for arguments, message in (
        (["lag", "--data", str(tmp_path / "none")], "no folder"),
        (["gausiank"], "there is no reproduction"),
        (["lag", "--out", str(tmp_path)], "say where they are with --data"),
        (["lag", "--finished", "--out", str(tmp_path)], "no run of lag has ended"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert "Traceback" not in result.output


def test_an_outcome_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "lag"
    folder.mkdir()
    for text in ("", "[]", '{"claims": [{"what": 3}]}'):
        (folder / "outcome.json").write_text(text)
        result = CliRunner().invoke(app, ["lag", "--finished", "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert "is not the outcome of a reproduction" in result.output


def test_all_are_listed_and_make_one_page(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, [])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in NAMES)
    page = tmp_path / "page.md"
    options = ["--quick", "--out", str(tmp_path), "--page", str(page)]
    shown = CliRunner().invoke(app, ["gspar", *options])
    assert shown.exit_code == 0, shown.output
    assert "not judged" in shown.output
    assert str(tmp_path / "gspar-quick") in shown.output.replace("\n", "")
    made = page.read_text()
    again = CliRunner().invoke(app, ["all", *options, "--finished"])
    assert again.exit_code == 0, again.output
    assert page.read_text().splitlines()[4:] == made.splitlines()[4:]
    assert f"`python -m reproductions all --data DATA --quick --finished --page {page}`" in page.read_text()
    assert "## gspar" in made
    assert "not judged" in made
    assert "](page/gspar.svg)" in made
    assert (tmp_path / "page" / "gspar.svg").read_text().startswith("<svg")


def test_it_runs_as_a_module() -> None:
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-m", "reproductions"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "distributions" in told.stdout
