"""Lanes at the end of a program."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
import torch
from thinwire.drivers import lanes

class Executor:
    def execute(self, operation):
        raise AssertionError

async def program():
    time.sleep(0.5)

queue = lanes.Lanes([Executor()], overlap=True)
step = lanes.Step(lambda committed: None)
queue.submit(0, lanes.Job(program(), step, lambda error: print("done", error), torch.device("cpu")))
step.close()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=400
    )


def test_a_program_that_ends_waits_for_the_work_of_its_lanes() -> None:
    ended = run(SCRIPT)
    assert (ended.returncode, ended.stdout) == (0, "done None\n"), ended.stderr


def test_it_does_not_wait_for_ever() -> None:
    ended = run(
        SCRIPT.replace("0.5", "60").replace(
            "queue =", "lanes.EXIT_TIMEOUT = 0.2; Executor.keep_for_ever = lambda self: None; queue ="
        )
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "its result is dropped" in ended.stderr


def test_work_whose_end_was_told_is_not_under_way() -> None:
    """The lane's thread is still on its way back when the training loop, which has its result, ends."""
    ended = run(
        SCRIPT.replace('print("done", error)', "(told.set(), time.sleep(0.3))").replace(
            "queue =", "import threading; told = threading.Event(); queue ="
        )
        + "told.wait()\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
