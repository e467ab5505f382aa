"""One command on every host of a lab, with the environment that torchrun gives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from thinwire.tools.lab.namespaces import Host, LabError
from thinwire.tools.processes import GRACE_SECONDS, end_all, exit_code

PORT = 29500
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def run(
    hosts: Sequence[Host], command: Sequence[str], show: Callable[[int, str], None], *, port: int = PORT
) -> int:
    """Start the command on every host and wait; the first that fails ends the others.

    Args:
        hosts: one process each; rank 0 is on the first.
        command: a program and its arguments.
        show: called with a rank and a line of its output, standard output and errors alike.
        port: of the first host, where ranks connect.

    Returns:
        0, or the exit code of the first that failed (128 and the signal's number if a signal ended it).
    """
    processes: list[subprocess.Popen[str]] = []
    lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    readers: list[threading.Thread] = []
    try:
        for rank, host in enumerate(hosts):
            processes.append(_start(host, command, _environment(rank, hosts, port)))
        # Threads begin when all processes have: code between fork and exec must not run beside any.
        for rank, process in enumerate(processes):
            readers.append(threading.Thread(target=_read, args=(rank, process, lines), daemon=True))
            readers[-1].start()
        return _watch(processes, lines, show)
    finally:
        end_all(processes)
        for reader in readers:
            reader.join(GRACE_SECONDS)


def _environment(rank: int, hosts: Sequence[Host], port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        **hosts[rank].environment(),
    }


def _start(host: Host, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)

    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, which can be ended with its children
        preexec_fn=die_with_parent,  # noqa: PLW1509  no thread has been started yet
    )


def _read(
    rank: int, process: subprocess.Popen[str], lines: queue.SimpleQueue[tuple[int, str | None]]
) -> None:
    if process.stdout is None:
        raise LabError("a process without output")
    with process.stdout as output:
        for line in output:
            lines.put((rank, line.rstrip("\n")))
    process.wait()
    lines.put((rank, None))


def _watch(
    processes: Sequence[subprocess.Popen[str]],
    lines: queue.SimpleQueue[tuple[int, str | None]],
    show: Callable[[int, str], None],
) -> int:
    running = len(processes)
    while running:
        # A process may end before its children close its output, so that is not what is waited for.
        with contextlib.suppress(queue.Empty):
            rank, line = lines.get(timeout=0.2)
            if line is not None:
                show(rank, line)
                continue
            running -= 1
        for process in processes:
            code = process.poll()
            if code:
                _drain(lines, show)
                return exit_code(code)
    return 0


def _drain(lines: queue.SimpleQueue[tuple[int, str | None]], show: Callable[[int, str], None]) -> None:
    """Show what those who failed had to say."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            rank, line = lines.get(timeout=0.1)
            if line is not None:
                show(rank, line)
