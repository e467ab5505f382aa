"""Every reproduction runs as a smoke run, without any dataset, and goes on where it stopped."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproductions import Context, find, names
from reproductions.cli import app
from thinwire.errors import ConfigError


@pytest.mark.parametrize("name", names())
def test_smoke(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [name, "--quick", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)[name]
    assert outcome["tables"]
    for claim in outcome["claims"]:
        assert claim["what"]
        assert claim["paper"]
        assert claim["ours"]
    folder = tmp_path / f"{name}-quick"
    assert json.loads((folder / "outcome.json").read_text()) == outcome


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(what: str) -> dict[str, str]:
        calls.append(what)
        return {"done": what}

    first = Context("x", data=None, quick=True, out=tmp_path)
    assert first.once("a", lambda: work("a")) == {"done": "a"}
    path = first.folder / "records.jsonl"
    path.write_text(path.read_text() + '{"key": "b", "val')  # killed while it wrote
    second = Context("x", data=None, quick=True, out=tmp_path)
    assert second.once("a", lambda: work("again")) == {"done": "a"}
    assert second.once("b", lambda: work("b")) == {"done": "b"}
    assert calls == ["a", "b"]
    third = Context("x", data=None, quick=True, out=tmp_path)
    assert third.once("b", lambda: work("again")) == {"done": "b"}


def test_unknown_names_and_missing_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gaussiank"):
        find("gausiank")
    with pytest.raises(ConfigError, match="--data"):
        _ = Context("x", data=None, quick=False, out=tmp_path).data
    result = CliRunner().invoke(app, ["lag", "--data", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no folder" in result.output


def test_all_are_listed_and_make_one_page(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, []).output
    assert all(name in listed for name in names())
    page = tmp_path / "page.md"
    options = ["--quick", "--out", str(tmp_path), "--page", str(page)]
    assert CliRunner().invoke(app, ["gspar", *options]).exit_code == 0
    made = page.read_text()
    again = CliRunner().invoke(app, ["all", *options, "--finished"])
    assert again.exit_code == 0, again.output
    assert page.read_text().splitlines()[4:] == made.splitlines()[4:]
    nothing = CliRunner().invoke(app, ["lag", "--finished", "--out", str(tmp_path)])
    assert nothing.exit_code == 2
    text = page.read_text()
    assert "## gspar" in text
    assert "not judged" in text
