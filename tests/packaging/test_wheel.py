"""The wheel in a new environment that has nothing but what the package declares: README's commands run there.

The environment is made without a network: declared dependencies, and theirs, are linked from this one. What
is not declared is not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMANDS = re.compile(r"^    ((?:thinwire|torchrun|python -m thinwire) [^#\n]*)", re.MULTILINE)
# What takes minutes is made shorter; the commands are otherwise README's own. In a new place every kernel is
# compiled anew: with these methods there is only one.
SHORTER = {
    "thinwire compare": "--steps 2 --workers 2 -m dense,fp16",
    "thinwire plan": "-m dense,fp16",
}


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def needed(requirement: Requirement, found: dict[str, metadata.Distribution]) -> None:
    """The distributions that a requirement brings along, extras included."""
    for extra in ["", *requirement.extras]:
        distribution = metadata.distribution(requirement.name)
        key = f"{distribution.metadata['Name'].lower()}[{extra}]"
        if key in found:
            continue
        found[key] = distribution
        for text in distribution.requires or ():
            inner = Requirement(text)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                needed(inner, found)


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Link the top-level files and folders of a distribution."""
    tops = {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        target, source = packages / top, Path(str(distribution.locate_file(top)))
        if source.exists() and not target.exists():
            target.symlink_to(source)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    made = run(build, folder)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = folder.glob("thinwire-*.whl")
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    found: dict[str, metadata.Distribution] = {}
    for text in metadata.requires("thinwire") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "cli"}):
            needed(requirement, found)
    for distribution in found.values():
        link(distribution, packages)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env/bin/python")]
    installed = run([*pip, "install", "--no-deps", "--no-index", str(wheel)], folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder / "env"


def test_the_package_is_the_wheel_s_and_undeclared_ones_are_absent(environment: Path, tmp_path: Path) -> None:
    code = "import thinwire, importlib.util as u; print(thinwire.__file__, u.find_spec('sklearn'))"
    found = run([str(environment / "bin/python"), "-c", code], tmp_path)
    where, sklearn = found.stdout.split()
    assert Path(where).is_relative_to(environment)
    assert sklearn == "None"


def readme_commands() -> list[str]:
    return [match.strip() for match in COMMANDS.findall((ROOT / "README.md").read_text())]


def test_readme_has_commands() -> None:
    commands = readme_commands()
    assert any(command.startswith("torchrun") for command in commands)
    assert any(command.startswith("thinwire plan") for command in commands)
    assert any(command.startswith("thinwire compare") for command in commands)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command.startswith("torchrun") else [])
        for command in readme_commands()
    ],
)
def test_a_command_of_the_readme_runs(command: str, environment: Path, tmp_path: Path) -> None:
    for script in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        (tmp_path / "train.py").write_text(script)
    program, *arguments = command.split()
    for start, more in SHORTER.items():
        if command.startswith(start):
            arguments += more.split()
    if program == "torchrun":
        module = ["-m", "torch.distributed.run"]
    elif program == "python":
        module = []
    else:
        module = ["-m", "thinwire"]
    result = run([str(environment / "bin/python"), *module, *arguments], tmp_path, COLUMNS="100")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100, "wider than 100 columns"
