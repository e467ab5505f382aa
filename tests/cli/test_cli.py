"""The command line, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thinwire
from thinwire.tools.cli import app


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for command in ("compare", "plan", "report", "methods", "reproduce", "gradients", "lab", "bench"):
        assert command in result.output
    assert all(name in call("bench", "--help").output for name in ("overhead", "kernels", "methods", "all"))


def test_methods_lists_what_is_registered() -> None:
    described = {one["name"]: one for one in json.loads(call("methods", "--json").output)}
    assert set(described) == {*thinwire.list_methods(), *thinwire.list_schedules()}
    assert described["qsgd"]["options"]["bits"] == 4
    assert described["dense"]["traits"]["consensus"] is True
    assert all(one["summary"] for one in described.values())
    assert "powersgd" in call("methods").output


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tpk", "did you mean 'topk'?"),
        ("topk(ratoi=0.1)", "did you mean 'ratio'?"),
        ("topk(ratio=7)", "ratio must be a number above 0 and up to 1, not 7"),
        ("topk(", "is not a method"),
    ],
)
def test_a_wrong_method_is_one_line_and_exit_code_2(method: str, expected: str) -> None:
    result = call("compare", "--methods", method, "--steps", "1")
    assert result.exit_code == 2
    assert expected in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_bench_digits_trains_and_compares(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "digits.json"
    result = call("bench", "digits", "--workers", "2", "--steps", "80", "-m", "topk", "--json", str(file))
    assert result.exit_code == 0, result.output
    dense, topk = json.loads(file.read_text())["results"]
    assert (dense["method"], topk["method"]) == ("dense", "topk(ratio=0.01)")
    assert dense["ratio"] == 1.0
    assert topk["ratio"] < 0.1
    assert dense["accuracy"] > 0.5
    assert topk["accuracy"] > 0.5
    assert "topk(ratio=0.01)" in result.output


def test_without_scikit_learn_compare_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    result = call("compare", "--steps", "1")
    assert result.exit_code == 2
    assert "pip install 'thinwire[demo]'" in result.output


def test_bench_methods_counts_copies(tmp_path: Path) -> None:
    file = tmp_path / "methods.json"
    result = call("bench", "methods", "--size", "10000", "-m", "dense", "-m", "topk", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["dense", "topk(ratio=0.01)"]
    assert all(row["copies"] > 0 and row["copies_in_place"] > 0 for row in rows)


def test_bench_overhead_measures_one_and_twenty_buckets(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    result = call("bench", "overhead", "--steps", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["buckets"] for row in rows] == [1, 20]
    assert all(row["parameters"] == 2_599_200 and len(row["milliseconds"]) == 3 for row in rows)


def test_a_page_for_each_method(tmp_path: Path) -> None:
    assert call("methods", "--pages", str(tmp_path / "pages")).exit_code == 0
    names = [*thinwire.list_methods(), *thinwire.list_schedules()]
    for name in names:
        assert (tmp_path / "pages" / f"{name}.md").read_text().startswith(f"# {name}\n")
    index = (tmp_path / "pages" / "README.md").read_text()
    assert all(f"[{name}]({name}.md)" in index for name in names)


def test_scale_of_few_simulated_workers(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    arguments = ("--workers", "2,8", "--size", "5000", "-m", "randomblock", "-m", "topk(reduce='gather')")
    assert call("bench", "scale", *arguments, "--json", str(file)).exit_code == 0
    rows = {
        (row["method"].split("(")[0], row["workers"]): row["sent_bytes"]
        for row in json.loads(file.read_text())
    }
    assert rows["randomblock", 8] < 2 * rows["randomblock", 2]
    assert rows["topk", 8] == 7 * rows["topk", 2]
    assert "numbers with commas" in call("bench", "scale", "--workers", "two").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--lnk", "100mbit"), "--link"),
        (("plan", "--workers", "many"), "--workers"),
        (("pln",), "'plan'"),
        (("bench", "kernel"), "'kernels'"),
        (("methods", "tpk"), "did you mean 'topk'?"),
        (("methods", "--digits", "nothing.json"), "give --pages"),
    ],
)
def test_a_mistake_is_one_line_with_a_hint(arguments: tuple[str, ...], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1
