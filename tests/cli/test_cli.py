"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import thinwire
from benchmarks.cli import bench
from reproductions.cli import app as reproductions
from reproductions.method_pages import write_pages
from thinwire.__main__ import NEEDED
from thinwire.tools.cli import app


def call(*arguments: str, command: typer.Typer = app):
    return CliRunner().invoke(command, list(arguments))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (app, ("compare", "plan", "report", "methods", "gradients", "lab")),
        (bench, ("overhead", "kernels", "methods", "all")),
        (reproductions, ("--quick", "--finished")),
    ],
    ids=["thinwire", "benchmarks", "reproductions"],
)
def test_help_names_every_command(command: typer.Typer, expected: tuple[str, ...]) -> None:
    result = call("--help", command=command)
    assert result.exit_code == 0
    assert all(name in result.output for name in expected)


def test_methods_lists_what_is_registered() -> None:
    described = {one["name"]: one for one in json.loads(call("methods", "--json").output)}
    assert set(described) == {*thinwire.list_methods(), *thinwire.list_schedules()}
    assert described["qsgd"]["options"]["bits"] == 4
    assert described["dense"]["traits"]["consensus"] is True
    assert all(one["summary"] for one in described.values())
    assert "powersgd" in call("methods").output


def test_a_method_in_full() -> None:
    output = call("methods", "qsgd").output
    assert "guarantees: same result on all ranks, unbiased" in output
    assert "bytes per step: ceil(n * bits / 8)" in output
    assert "reference: Alistarh" in output


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


def test_without_scikit_learn_compare_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = call("compare", "--steps", "1")
    assert result.exit_code == 2
    assert "pip install 'thinwire[demo]'" in result.output


def test_the_extra_is_what_the_command_looks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["cli"]
    assert sorted(re.split("[<>=~]", each)[0] for each in extra) == sorted(NEEDED)


@pytest.mark.parametrize("missing", ["typer", "plotly"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from thinwire.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stdout == ""
    expected = f"thinwire: the command line needs {missing}: pip install 'thinwire[cli]'\n"
    assert result.stderr == expected


def test_help_imports_nothing_heavy() -> None:
    script = """
import sys
from thinwire.__main__ import main
try:
    main()
except SystemExit:
    pass
sys.exit(", ".join({"torch", "numpy", "numba", "plotly", "jinja2"} & sys.modules.keys()) or 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=False
    )
    assert "compare" in result.stdout
    assert (result.returncode, result.stderr) == (0, "")


def test_a_page_for_each_method(tmp_path: Path) -> None:
    write_pages(tmp_path / "pages", None)
    names = [*thinwire.list_methods(), *thinwire.list_schedules()]
    for name in names:
        assert (tmp_path / "pages" / f"{name}.md").read_text().startswith(f"# {name}\n")
    index = (tmp_path / "pages" / "README.md").read_text()
    assert all(f"[{name}]({name}.md)" in index for name in names)


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (app, ("plan", "--lnk", "100mbit"), "--link"),
        (app, ("plan", "--workers", "many"), "--workers"),
        (app, ("pln",), "'plan'"),
        (bench, ("kernel",), "'kernels'"),
        (app, ("methods", "tpk"), "did you mean 'topk'?"),
        (app, ("methods", "--jsn"), "--json"),
        (app, ("compare", "--optimizer", "sdg"), "'sgd'"),
    ],
)
def test_a_usage_error_is_one_line_with_a_hint(
    command: typer.Typer, arguments: tuple[str, ...], expected: str
) -> None:
    result = call(*arguments, command=command)
    assert result.exit_code == 2
    assert expected in result.output
    assert len(result.output.strip().splitlines()) == 1
