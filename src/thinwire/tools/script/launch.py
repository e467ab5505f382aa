"""Starts a script's workers on this machine, as torchrun would, and ends all of them if one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from thinwire.tools.lab.job import PORT
from thinwire.tools.lab.namespaces import Host
from thinwire.tools.processes import end_all, exit_code
from thinwire.tools.script.messages import Failure, Job, Receiver, Reported

POLL_SECONDS = 0.05
LEAVING_SECONDS = 2.0
"""A worker that fails has this long to end by itself."""


@dataclass(frozen=True)
class Failed:
    """The worker that failed first."""

    rank: int
    code: int
    text: str


def launch(
    job: Job,
    workers: int,
    on_message: Callable[[int, Reported], None],
    *,
    hosts: Sequence[Host] | None = None,
    logs: Path | None = None,
) -> Failed | None:
    """Run a job in local workers. No process outlives the call.

    Args:
        job: its folder is set here.
        workers: how many.
        on_message: called with a rank and what it reports.
        hosts: of the lab, one per worker; None: this machine.
        logs: a folder for the output, a file per rank; None: the output is this process's.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-")))
        job = msgspec.structs.replace(job, folder=str(folder), launcher=os.getpid(), to_log=logs is not None)
        receivers = [Receiver(folder, rank) for rank in range(workers)]
        for receiver in receivers:
            stack.callback(receiver.close)
        # This process keeps the store, on a port that the system picks: no race for a port. Hosts of a lab
        # cannot reach it, and have all ports to themselves.
        store = None if hosts else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = _Group(receivers, on_message)
        try:
            for rank in range(workers):
                given = _environment(rank, workers, store.port if store else PORT, hosts)
                output = None if logs is None else stack.enter_context((logs / f"rank{rank}.log").open("wb"))
                group.processes.append(
                    subprocess.Popen(
                        [
                            *(["ip", "netns", "exec", hosts[rank].name] if hosts else []),
                            *(sys.executable, "-m", "thinwire.tools.script.worker"),
                            msgspec.json.encode(job).decode(),
                        ],
                        env={**os.environ, **given},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=None if output is None else subprocess.STDOUT,
                        start_new_session=True,  # a group of its own, which can be ended with its children
                    )
                )
            return group.watch()
        except KeyboardInterrupt:
            end_all(group.processes, signal.SIGINT)  # as the terminal would: a script may save its work
            raise
        finally:
            end_all(group.processes)
            del store


class _Group:
    """The workers and what they have reported."""

    def __init__(self, receivers: Sequence[Receiver], on_message: Callable[[int, Reported], None]) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._receivers = receivers
        self._on_message = on_message
        self._failures: dict[int, Failure] = {}

    def watch(self) -> Failed | None:
        while True:
            codes = [process.poll() for process in self.processes]
            self._listen()
            dead = next((rank for rank, code in enumerate(codes) if code), None)
            if dead is not None or self._failures:
                return self._end(dead)
            if all(code == 0 for code in codes):
                return None
            time.sleep(POLL_SECONDS)

    def _listen(self) -> None:
        for rank, receiver in enumerate(self._receivers):
            for message in receiver.receive():
                if isinstance(message, Failure):
                    self._failures[rank] = message
                else:
                    self._on_message(rank, message)

    def _end(self, dead: int | None) -> Failed:
        """The failure that came first: the others fail because of it. A worker may die without a report."""
        if dead is not None:
            self._listen()
        rank = dead if dead is not None and dead not in self._failures else self._first()
        deadline = time.monotonic() + LEAVING_SECONDS
        while self.processes[rank].poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        end_all(self.processes)
        self._listen()
        if rank in self._failures:
            rank = self._first()
            failure = self._failures[rank]
            return Failed(rank, failure.code, failure.text)
        code = exit_code(self.processes[rank].returncode)
        return Failed(rank, code, f"it ended with exit code {code}, without a traceback")

    def _first(self) -> int:
        return min(self._failures, key=lambda rank: self._failures[rank].at)


def _environment(rank: int, workers: int, port: int, hosts: Sequence[Host] | None) -> Mapping[str, str]:
    """What torchrun sets, on one machine or on a host of the lab per worker."""
    local, machine = (0, rank) if hosts else (rank, 0)
    threads = max(1, (os.cpu_count() or 1) // workers)
    given = {
        "RANK": rank,
        "WORLD_SIZE": workers,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": 1 if hosts else workers,
        "GROUP_RANK": machine,
        "GROUP_WORLD_SIZE": workers if hosts else 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": workers,
        "ROLE_NAME": "default",
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "thinwire",  # by this frameworks know that the workers are started already
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": not hosts,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in given.items()} | (hosts[rank].environment() if hosts else {})
