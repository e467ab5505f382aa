"""Processes that end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

GRACE_SECONDS = 5.0


def end_all(processes: Sequence[subprocess.Popen[Any]], first: signal.Signals = signal.SIGTERM) -> None:
    """End every process and its children; each leads a group of its own."""
    for number in (first, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def exit_code(code: int) -> int:
    """As a shell gives it: 128 and the signal's number if a signal ended the process."""
    return code if code >= 0 else 128 - code
