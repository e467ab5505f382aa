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
from tests.report.made import made
from thinwire.__main__ import NEEDED
from thinwire.tools.cli import app
from thinwire.tools.compare.records import to_lines


def call(*arguments: str, command: typer.Typer = app):
    return CliRunner().invoke(command, list(arguments))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (app, ("run", "compare", "plan", "report", "methods", "gradients", "lab", "study")),
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


def test_no_command_needs_scikit_learn_or_scipy(tmp_path: Path) -> None:
    """Not even the digits: they come with the package."""
    script = f"""
import sys
sys.modules["sklearn"] = sys.modules["scipy"] = None
from thinwire.__main__ import main
from thinwire.tools.workloads import load
assert len(load("digits").inputs) == 1437
for arguments in (["methods"], ["plan", "--parameters", "5k", "-m", "fp16"],
                  ["report", "--no-predict", {str(_records(tmp_path))!r}]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _records(folder: Path) -> Path:
    path = folder / "records.jsonl"
    path.write_bytes(to_lines(made()))
    return path


def test_no_extra_brings_scikit_learn_but_that_of_developers() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needing = [
        name for name, needs in extras["optional-dependencies"].items() if "scikit-learn" in str(needs)
    ]
    assert needing == ["dev"]
    assert "scikit-learn" not in str(extras["dependencies"])


def test_version_is_printed_without_torch() -> None:
    script = """
import sys
from thinwire.__main__ import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
sys.exit(", ".join({"torch", "numpy", "numba"} & sys.modules.keys()) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"thinwire {thinwire.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--out", "{file}/folder"),
        ("study", "--out", "{file}/folder"),
        ("gradients", "--out", "{file}/page.html"),
        ("gradients", "--out", "{folder}"),
        ("gradients", "--json", "{file}/numbers.json"),
        ("report", "{records}", "--out", "{file}/page.html"),
        ("report", "{records}", "--picture", "{folder}"),
    ],
)
def test_what_cannot_be_written_is_noticed_before_anything_is_computed(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinwire.tools import gradients, report
    from thinwire.tools.compare import runner

    def computed(*_: object, **__: object) -> None:
        raise AssertionError("computed")

    for module, name in ((runner, "run"), (gradients, "run"), (report, "write")):
        monkeypatch.setattr(module, name, computed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    places = {"file": tmp_path / "file", "folder": tmp_path, "records": _records(tmp_path)}
    before = sorted(tmp_path.iterdir())
    result = call(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert "cannot write" in result.output
    assert len(result.output.strip().splitlines()) == 1
    after = [path for path in sorted(tmp_path.iterdir()) if path.name != "out"]
    assert after == before


def test_a_worker_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from thinwire.net.launch import WorkerFailedError
    from thinwire.tools import gradients

    def failed(*_: object) -> None:
        raise WorkerFailedError("rank 1:\nTraceback\n  File x\nMemoryError: no memory left\n")

    monkeypatch.setattr(gradients, "run", failed)
    result = call("gradients", "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert result.output == "thinwire: a worker failed: MemoryError: no memory left\n"


@pytest.mark.parametrize(
    "arguments", [("methods",), ("methods", "topk"), ("compare", "--help"), ("study", "--help")]
)
def test_texts_fit_100_columns(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    output = call(*arguments).output
    assert max(map(len, output.splitlines())) <= 100
    assert "…" not in output


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
        (app, ("study", "--rule", "randomblock"), "'random block'"),
        (app, ("study", "--ratio", "2"), "ratio"),
    ],
)
def test_a_usage_error_is_one_line_with_a_hint(
    command: typer.Typer, arguments: tuple[str, ...], expected: str
) -> None:
    result = call(*arguments, command=command)
    assert result.exit_code == 2
    assert expected in result.output
    assert len(result.output.strip().splitlines()) == 1
