"""examples/checkpoint.py: killed, restarted and resized runs end where they should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 160


def command(folder: Path, *, ranks: int, steps: int = STEPS, method: str = "topk(ratio=0.01)") -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
    script = [str(ROOT / "examples/checkpoint.py"), "--folder", str(folder), "--steps", str(steps)]
    return [*launcher, "--nproc-per-node", str(ranks), *script, "--method", method]


def start(folder: Path, **options) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command(folder, **options), env=environment, **pipes)


def run(folder: Path, **options) -> str:
    process = start(folder, **options)
    try:
        printed = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    assert process.returncode == 0, printed[-3000:]
    return printed


def workers(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            script = (status.parent / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if parent == launcher and b"checkpoint.py" in script:
            found.append(int(status.parent.name))
    return sorted(found)


def begins(printed: str) -> list[int]:
    return [int(step) for step in re.findall(r"begins at step (\d+)", printed)]


def digest(printed: str) -> str:
    return re.search(r"parameters ([0-9a-f]{16})", printed)[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters of a run that nobody disturbed."""
    return digest(run(tmp_path_factory.mktemp("straight"), ranks=2))


@pytest.mark.slow
def test_a_killed_run_restarts_and_ends_with_the_same_bits(tmp_path: Path, straight: str) -> None:
    printed, killed = [], []
    with start(tmp_path, ranks=2) as process:
        for line in process.stdout:
            printed.append(line)
            if line.startswith("saves step 60") and not killed:
                killed = workers(process.pid)
                os.kill(killed[-1], signal.SIGKILL)
        process.wait(timeout=400)
    text = "".join(printed)
    assert process.returncode == 0, text[-3000:]
    assert len(killed) == 2
    first, second = begins(text)
    assert first == 0
    assert 40 <= second < STEPS
    assert second % 20 == 0
    assert digest(text) == straight
    assert len(list(tmp_path.glob("step-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topk(ratio=0.01)", "pqasgd(every=8, bits=8)"])
def test_it_continues_with_more_and_with_fewer_ranks(tmp_path: Path, method: str) -> None:
    for ranks, steps, expected in ((2, 40, 0), (3, 80, 40), (1, 100, 80)):
        text = run(tmp_path, ranks=ranks, steps=steps, method=method)
        assert begins(text) == [expected]
        assert float(re.search(r"accuracy ([0-9.]+)", text)[1]) > 0.95
