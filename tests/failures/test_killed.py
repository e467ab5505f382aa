"""Checkpoints under SIGKILL: at whatever moment it comes, the run continues bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-m", "tests.failures.killed", str(tmp_path), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    logs = "\n".join(path.read_text()[-600:] for path in sorted(tmp_path.glob("attempt-*/log-0")))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    straight, killed, attempts = done.stdout.splitlines()
    assert killed == straight
    assert int(attempts) > 2, "it was hardly killed"
    generations = list((tmp_path / "killed").glob("step-*"))
    assert len(generations) == 2, "what a killed attempt left is removed"
    assert all((path / "manifest.json").exists() for path in generations)
    assert "could not be written" not in (tmp_path / "straight/log-0").read_text()
