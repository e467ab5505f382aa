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
        (["lag", "--quick", "--records"], "leave out --quick"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert "Traceback" not in result.output


def test_what_is_left_is_said(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = ["--finished", "--out", str(tmp_path), "--page", str(page)]
    told = CliRunner().invoke(app, ["sparse", "--quick", *options])
    assert told.exit_code == 0, told.output
    assert "left: the study of three parameters" in told.output.replace("\n", " ")
    assert "not judged" in page.read_text()


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
    again = CliRunner().invoke(app, ["gspar", *options, "--finished"])
    assert again.exit_code == 0, again.output
    assert page.read_text().splitlines()[4:] == made.splitlines()[4:]
    assert f"`python -m reproductions gspar --data DATA --quick --finished --page {page}`" in page.read_text()
    assert "What makes a claim fail:" in made
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
