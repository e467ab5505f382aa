"""Every example runs, and the diff on the pages is the real one."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.integrations.common import environment
from thinwire.net.launch import Worker, run_local

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(worker: Worker, name: str, arguments: list[str]) -> str:
    """Run an example as `torchrun` does, in a process that already has a group; returns its output."""
    environment(worker)
    dist.init_process_group = lambda *given, **named: None
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def printed_by(name: str, *arguments: str, workers: int = 2) -> str:
    first, *others = run_local(run_example, workers, name, list(arguments), timeout=400)
    assert not any(others), "only rank 0 prints"
    return first


def accuracy(text: str) -> float:
    return float(re.search(r"accuracy ([0-9.]+)", text)[1])


def bytes_sent(text: str) -> int:
    return int(re.search(r"([0-9,]+) bytes sent per step", text)[1].replace(",", ""))


def test_before_and_after_learn_the_same_with_fewer_bytes() -> None:
    before = printed_by("ddp_before.py", "--steps", "60")
    after = printed_by("ddp_after.py", "--steps", "60")
    assert accuracy(before) > 0.9
    assert accuracy(after) > 0.9
    assert bytes_sent(after) < 4.2 / 32 * 1_204_264, "four of 32 bits, and scales"


def test_periodic() -> None:
    text = printed_by("periodic.py", "--steps", "48")
    assert accuracy(text) > 0.9
    assert "pqasgd(every=8, bits=8)" in text
    assert bytes_sent(text) < 0.05 * 1_204_264
    assert "localsgd(every=16)" in printed_by(
        "periodic.py", "--steps", "16", "--method", "localsgd(every=16)"
    )


def test_with_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed_by("with_tensorboard.py", "--steps", "30", "--folder", str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("loss")) == 3
    sent = [each.value for each in events.Scalars("thinwire/bytes_sent")]
    assert sent == sorted(sent)
    assert [each.value for each in events.Scalars("thinwire/steps")] == [10, 20, 30]


# The tests of the integrations train with all three.
@pytest.mark.parametrize(
    "name",
    ["accelerate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lightning", "transformers"))],
)
def test_with_a_framework(name: str, tmp_path: Path) -> None:
    text = printed_by(f"with_{name}.py", "--steps", "150", "--folder", str(tmp_path))  # 20 of them exact
    assert len((EXAMPLES / f"with_{name}.py").read_text().splitlines()) <= 40
    assert bytes_sent(text) < 0.2 * 4 * {"transformers": 106_176}.get(name, 38_410)
    assert any(tmp_path.rglob("thinwire-rank-1-of-2.pt" if name != "lightning" else "*.ckpt"))


def test_fsdp() -> None:
    text = printed_by("fsdp.py", workers=4)
    assert accuracy(text) > 0.9
    assert bytes_sent(text) < 0.05 * 1_204_264 / 2
    assert len((EXAMPLES / "fsdp.py").read_text().splitlines()) <= 40


def test_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be, or not to be, that is the question. " * 40)
    text = printed_by(
        "text.py", "--steps", "12", "--batch", "4", "--text", str(file), "--method", "powersgd(rank=4)"
    )
    found = re.search(r"perplexity ([0-9.]+) of (\d+) symbols with powersgd", text)
    symbols = len(set(file.read_text()))
    assert int(found[2]) == symbols
    assert float(found[1]) < symbols


@pytest.mark.slow
def test_text_under_torchrun_picks_its_method() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(EXAMPLES / "text.py"), "--steps", "7", "--batch", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "thinwire: auto: " in done.stderr
    assert re.search(r"perplexity [0-9.]+ of 13 symbols with ", done.stdout)


def difference() -> list[str]:
    """The lines of code that only one of the two scripts has."""
    changed = [
        line for line in difflib.ndiff(_code("ddp_before.py"), _code("ddp_after.py")) if line[0] in "+-"
    ]
    return [line for line in changed if line[2:].strip()]


def _code(name: str) -> list[str]:
    """Without the docstring."""
    return (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()


def test_three_lines_are_all_that_changes() -> None:
    changed = difference()
    assert len(changed) == 3
    assert all(line.startswith("+ ") for line in changed)
    assert any("thinwire.attach(model" in line for line in changed)


@pytest.mark.parametrize("page", ["examples/README.md", "README.md"])
def test_the_diff_on_the_page_is_the_real_one(page: str) -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    added = [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
    assert not [line for line in block.splitlines() if line.startswith("-")]
    real = [line[2:].strip() for line in difference()]
    if page == "examples/README.md":
        assert added == real
    else:  # the front page shows the idea: the same import, the same attach, and the meter
        assert added[:2] == real[:2]
        assert len(added) == 3
        assert added[2] == "print(session.meter)"
