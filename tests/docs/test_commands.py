"""Every command line and every block of Python on the pages works.

Commands are run in a copy of the docs and the examples, with smaller options where they would take long
(`RULES`). The default run checks the options of all commands and runs the quick ones; `make test-slow` runs
the rest.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import thinwire
from benchmarks.cli import bench
from reproductions.cli import app as reproductions
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands
from tests.script.forked import use_forked_workers
from thinwire import list_methods, list_schedules
from thinwire.tools.cli import app

APPS = {"thinwire": app, "python -m thinwire": app, "python -m benchmarks": bench}
APPS["python -m reproductions"] = reproductions
MAKEFILE = (ROOT / "Makefile").read_text()


@dataclass(frozen=True)
class Rule:
    """What becomes of the commands that match `pattern`: the first rule that does counts.

    `edits` replace text (regular expressions), `options` are set. `slow` and `skip` say when it is not run.
    """

    pattern: str
    edits: tuple[tuple[str, str], ...] = ()
    options: str = ""
    slow: bool = False
    skip: str = ""


RULES = (
    Rule(r"make ", skip="only that the target exists is checked"),
    Rule(r".*--device cuda", skip="needs a GPU"),
    Rule(r"python -m (?!benchmarks\b|reproductions\b)", skip="only that the module exists is checked"),
    # Mentions of a command, without what it needs.
    Rule(
        r"(thinwire (run|plan|report|lab|compare|gradients|study)|python -m (benchmarks|reproductions))$",
        options="--help",
    ),
    Rule(r"thinwire lab |.*\blab:|python -m benchmarks (predict|hsdp|pieces)", skip="needs root"),
    Rule(r"thinwire .*\bDATA\b", skip="needs the datasets"),
    Rule(r"thinwire run .*train\.py", edits=((r" ARGS$", ""),)),
    Rule(
        r"thinwire compare train\.py (?!.*--metric)",
        edits=((r" -- ARGS", ""), (r" -m .*", "")),
        options="--steps 2 --workers 2 -m dense",
        slow=True,
    ),
    Rule(
        r"thinwire compare train\.py",
        edits=((r" -- ARGS", ""), (r" -m .*", "")),
        options="--steps 2 --workers 2 -m dense",
    ),
    Rule(r"thinwire plan train\.py", edits=((r" -- ARGS", ""),), options="--workers 2 -m topk"),
    Rule(
        r"thinwire compare",
        options="--steps 2 --workers 2 --evaluate-every 2 -m dense",
        edits=((r" -m .*", ""), (r" --epochs \S+", ""), (r"--hidden \S+", "--hidden 20,20")),
    ),
    Rule(r"thinwire study", options="--steps 2 --workers 2 --rule 'random block'", slow=True),
    Rule(r"thinwire report", edits=((r"report \S+", "report out/made"),)),
    Rule(r"thinwire plan", edits=((r"--parameters \S+", "--parameters 200000"),), options="--workers 2"),
    Rule(
        r"thinwire gradients",
        edits=((r"--model all", "--model logistic,lstm"),),
        options="--steps 2 --workers 2 --batch 4",
    ),
    # The tests of the benchmarks run these, too.
    Rule(r"python -m benchmarks (overhead|run)", options="--steps 1", slow=True),
    Rule(r"python -m benchmarks gpu-kernels", options="--only block"),
    Rule(r"python -m benchmarks methods", options="--size 5000 -m topk"),
    Rule(r"python -m benchmarks checksums", options="--size 5000 --steps 1 -m topk", slow=True),
    Rule(r"python -m benchmarks kernels", edits=((r"\bT$", "1"),), options="--size 5000 --only sign"),
    Rule(r"python -m benchmarks memory$", options="--size 5000 -m dense", slow=True),
    Rule(r"python -m benchmarks memory", options="--size 5000 -m topk"),
    Rule(r"python -m benchmarks scale", options="--workers 2,4 --size 5000 -m topk"),
    Rule(
        r"python -m benchmarks recovery",
        edits=((r" --data DATA", ""),),
        options="--only mlp --steps 4",
        slow=True,
    ),
    Rule(r"python -m benchmarks digits", options="--workers 2 --steps 2 --seeds 1 -m topk", slow=True),
    Rule(r"python -m benchmarks language-page", edits=((r"page .*", "page"),), options="--help"),
    Rule(r"python -m benchmarks language .*\bDATA\b", skip="needs the datasets"),
    Rule(r"python -m benchmarks language", options="--steps 10 --seeds 1 --batch 1 -m topk", slow=True),
    Rule(r"python -m benchmarks peers", options="--steps 1", slow=True),
    Rule(r"python -m benchmarks all", options="--steps 1 --size 5000", slow=True),
    Rule(
        r"python -m reproductions all .*--finished", edits=((r"all .*--finished", "lag --quick --finished"),)
    ),
    Rule(r"python -m reproductions all .*--at-once", edits=((r"all .*", "lag"),), options="--quick"),
    Rule(r"python -m reproductions", edits=((r" --data DATA", ""),), options="--quick", slow=True),
    Rule(r"torchrun .*\bHOST\b", skip="needs several machines"),
    Rule(r"torchrun .*train\.py", skip="train.py stands for the reader's own script"),
    Rule(
        r"torchrun .* -m thinwire plan",
        edits=((r"torchrun .* -m", "torchrun --standalone --nproc-per-node 2 -m"),),
        slow=True,
    ),
    Rule(
        r"torchrun .*examples/ddp_after\.py",
        edits=((r"-node \d+", "-node 2"),),
        options="--steps 2",
        slow=True,
    ),
    Rule(r"torchrun .*examples/checkpoint\.py", options="--steps 2", slow=True),
    Rule(r"torchrun .*examples/fault_tolerance\.py", skip="needs a lighthouse and several groups"),
    Rule(r"python examples/fault_tolerance\.py", slow=True),
    Rule(
        r"torchrun .*examples/",
        edits=((r"-node \d+", "-node 2"), (r"\bFILE\b", "README.md")),
        options="--steps 2",
        slow=True,
    ),
)


def rule_for(command: str) -> Rule:
    plain = environment_of(command)[1].replace("python -m thinwire", "thinwire")
    return next((rule for rule in RULES if re.match(rule.pattern, plain)), Rule(""))


def environment_of(command: str) -> tuple[dict[str, str], str]:
    """The assignments before a command, and the command."""
    assignments, plain = re.match(r"((?:[A-Z_]+=\S+ +)*)(.*)", command).groups()
    return dict(each.split("=", 1) for each in assignments.split()), plain


def smaller(command: str) -> str:
    """The command with the edits and options of its rule."""
    rule = rule_for(command)
    for pattern, replacement in rule.edits:
        command = re.sub(pattern, replacement, command)
    program, rest = re.match(r"((?:[A-Z_]+=\S+ )*(?:python -m \S+|\S+))(.*)", command).groups()
    given = shlex.split(rule.options)
    while given:
        name = given.pop(0)
        value = f" {shlex.quote(given.pop(0))}" if given and not given[0].startswith("-") else ""
        rest, replaced = re.subn(rf"{name}(?![\w-])( (?!-)(\"[^\"]*\"|\S+))?", f"{name}{value}", rest)
        rest += "" if replaced else f" {name}{value}"
    return program + rest


FOUND = {command: page for page in reversed(PAGES) for command in commands(page.read_text())}
# Commands that are the same once they are small are run once.
SMALL = {smaller(command): command for command in reversed(FOUND)}


def run_or_skip(small: str) -> Any:
    rule = rule_for(SMALL[small])
    marks = [pytest.mark.slow] if rule.slow else []
    marks += [pytest.mark.skip(reason=f"{rule.skip}: {SMALL[small]}")] if rule.skip else []
    return pytest.param(small, marks=marks, id=small)


def test_commands_are_found() -> None:
    text = """
    thinwire compare --link 1gbit \\
      -m topk      # a comment

    thinwire: not a command, but its output

```
$ torchrun a.py
  thinwire topk      12 ms
```
```python
make = 1
```
`make docs`, `make` and ``make x``
"""
    assert commands(text) == ["thinwire compare --link 1gbit -m topk", "torchrun a.py", "make docs"]
    assert len(FOUND) > 30
    assert (
        smaller("python -m benchmarks scale")
        == "python -m benchmarks scale --workers 2,4 --size 5000 -m topk"
    )
    assert smaller("thinwire compare --steps 900") == (
        "thinwire compare --steps 2 --workers 2 --evaluate-every 2 -m dense"
    )


@pytest.mark.parametrize("command", sorted(FOUND))
def test_a_command_has_valid_options(command: str) -> None:
    """Without running it; also those that need data, root or several machines."""
    where = f"{FOUND[command].relative_to(ROOT)}: {command}"
    words = shlex.split(environment_of(command)[1].replace(" ...", ""))
    if words[0] == "make":
        for target in words[1:]:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), where
    elif words[0] == "torchrun" or words[1].startswith("examples/"):
        check_torchrun(words[1:], where)
    else:
        name = words[0] if words[0] == "thinwire" else " ".join(words[:3])
        if name in APPS:
            check_options(APPS[name], words[1 if name == "thinwire" else 3 :], where)
        else:
            assert importlib.util.find_spec(words[2]), f"{where}: there is no module {words[2]}"


def check_torchrun(words: list[str], where: str) -> None:
    given = get_args_parser().parse_args(words)
    if given.module:
        assert given.training_script == "thinwire", where
        check_options(app, given.training_script_args, where)
    elif given.training_script != "train.py":
        script = ROOT / given.training_script
        assert script.is_file(), where
        for option in [word for word in given.training_script_args if word.startswith("--")]:
            assert f'"{option}"' in script.read_text(), f"{where}: {option}"


def check_options(application: typer.Typer, words: list[str], where: str) -> None:
    """Go down to the last subcommand, and let it parse its options."""
    command: Any = typer.main.get_command(application)
    while hasattr(command, "commands"):
        if not words:
            return  # a mention of a group
        name, *words = words
        assert name in command.commands, f"{where}: there is no command {name}"
        command = command.commands[name]
    numbers = {"N": "2", "T": "1"}
    try:
        command.make_context("checked", [numbers.get(word, word) for word in words], resilient_parsing=False)
    except Exception as error:
        if words or "issing" not in str(error):  # `thinwire report` alone is the mention of a command
            pytest.fail(f"{where}: {error}")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a command may read and overwrite."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "README.md", folder)
    (folder / "mymodel.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(200, 100)\n"
    )
    # In the place of the reader's own script.
    shutil.copy(ROOT / "examples/ddp_before.py", folder / "train.py")
    return folder


@pytest.mark.parametrize("command", [run_or_skip(small) for small in sorted(SMALL)])
def test_a_command_runs(command: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(str(clone))
    use_forked_workers(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(clone), *sys.path]))  # for processes that it starts
    assigned, plain = environment_of(command)
    for name, value in assigned.items():
        monkeypatch.setenv(name, value)
    words = shlex.split(plain)
    if "out/made" in words:
        made = call(
            "thinwire", [*shlex.split(smaller("thinwire compare --link none")[9:]), "--out", "out/made"]
        )
        assert made.exit_code == 0, made.output
    if "--finished" in words:  # shows what an earlier run has found
        assert call("python -m reproductions", ["lag", "--quick"]).exit_code == 0
    if words[0] == "torchrun" or words[1].startswith("examples/"):
        launch(["-m", "torch.distributed.run"] if words[0] == "torchrun" else [], words[1:])
        return
    name = words[0] if words[0] == "thinwire" else " ".join(words[:3])
    result = call(name, words[1 if name == "thinwire" else 3 :])
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"


def call(name: str, words: list[str]) -> Any:
    return CliRunner().invoke(APPS[name], words)


def launch(launcher: list[str], words: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr[-3000:]}"


# -- method strings ----------------------------------------------------------------------------------------

METHODS = {**list_methods(), **list_schedules()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_method_string_is_one(page: Path) -> None:
    """Inline code such as `topk(ratio=0.01)`; `topk(ratio)` and `topk(...)` only name options."""
    for text in re.findall(r"(?<!`)`(\w+\([^`\n]*\))`(?!`)", page.read_text()):
        name, _, options = text.partition("(")
        if name in METHODS and "=" in options and "..." not in options:
            thinwire.parse(text)


# -- blocks of Python --------------------------------------------------------------------------------------

WITH_PYTHON = {str(page.relative_to(ROOT)): found for page in PAGES if (found := blocks(page.read_text()))}


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment that torchrun gives to a single rank."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore")  # PyTorch's own hooks warn
@pytest.mark.parametrize("page", sorted(WITH_PYTHON))
def test_the_python_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks one after the other, as one program."""
    module = types.ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", module)
    for number, block in enumerate(WITH_PYTHON[page], 1):
        where = f"{page}, block {number}"
        if block.kind == "from":
            check_excerpt(block, where)
        else:
            code = compile(block.code, where, "exec", dont_inherit=True)
            if block.kind == "run":
                exec(code, module.__dict__)


def check_excerpt(block: Block, where: str) -> None:
    whole = textwrap.dedent((ROOT / block.file).read_text())
    lines = block.code.strip("\n").splitlines()
    for indent in ("", "    "):
        if "\n".join(indent + line if line else "" for line in lines) in whole:
            return
    pytest.fail(f"{where} is not a part of {block.file}")


def test_blocks_are_found() -> None:
    text = "<!-- setup\na = 1\n-->\n```python\nb = a\n```\n<!-- fragment -->\n```python\nc = ...\n```\n"
    text += "<!-- from x.py -->\n\n```python\nd = 1\n```\ntext\n```python\ne = b\n```\n"
    found = blocks(text)
    assert [block.kind for block in found] == ["run", "run", "fragment", "from", "run"]
    assert found[0].code.strip() == "a = 1"
    assert found[3].file == "x.py"
    assert len(WITH_PYTHON) > 3
