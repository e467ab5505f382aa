"""Workers of scripts, forked from a process that has PyTorch and all else: their start takes seconds each.

In the place of the processes that `thinwire.tools.script.launch` starts, where a test is not about the start.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec
import pytest
import torch

from thinwire.net.launch import PRELOADED
from thinwire.tools.script.messages import Job
from thinwire.tools.script.worker import work


def use_forked_workers(patch: pytest.MonkeyPatch) -> None:
    stands_in = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    patch.setattr("thinwire.tools.script.launch.subprocess", stands_in)


class Forked:
    """A worker, with what its launcher uses of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO | None, **rest: Any
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        streams = (_Stream(1), _Stream(2)) if stdout is None else (_Stream(stdout.fileno()),) * 2
        self._process: Any = context.Process(target=_work, args=(words[-1], dict(env), os.getcwd(), *streams))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
        return self._process.exitcode


class _Stream:
    """An open file of this process, which the worker gets."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(passed: Any) -> int:
    return passed.detach()


def _work(job: str, environment: dict[str, str], folder: str, out: int, errors: int) -> None:
    """What a new interpreter would do."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    sys.stdout.reconfigure(write_through=True)
    sys.path.insert(0, "")  # the script's folder takes this place
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        work(msgspec.json.decode(job, type=Job))
    finally:
        atexit._run_exitfuncs()
