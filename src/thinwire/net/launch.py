"""Worker processes on this machine, connected by gloo, for demos, benchmarks and tests.

They run on loopback or, if hosts of the lab are given, each in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError


class Host(Protocol):
    """A host of the lab: where a worker runs instead of on this machine's own network."""

    def enter(self) -> None:
        """Move the calling process to the host; it cannot leave."""


PRELOADED = ["thinwire.hosts.attach", "torch._dynamo", "thinwire.kernels.preload"]
"""Imported once, not for seconds in every worker: optimizers need the second, kernels the third."""

_ONE_LOOK = threading.Lock()
"""When multiprocessing starts a process it also polls all others, whatever their thread. Two concurrent polls
of a process that has just ended lose its exit code: the second one reads an empty pipe and reports 255."""


class WorkerFailedError(RuntimeError):
    """A worker process raised or died; the text has its traceback."""


def _send(line: Connection, kind: str, content: object) -> None:
    # Pickled here, by value: the pipe's own pickler shares tensors through the sender, which may have ended.
    line.send_bytes(pickle.dumps((kind, content)))


class Worker:
    """The argument of a worker function: its rank, and its connection to the parent."""

    def __init__(self, rank: int, size: int, line: Connection) -> None:
        self.rank = rank
        self.size = size
        self._line = line

    def report(self, message: object) -> None:
        """Send something to the parent's `on_report`."""
        _send(self._line, "report", message)


@dataclass
class Outcome:
    """How one worker ended: with a value, with an error, or by its exit code alone."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def run_local(
    function: Callable[..., Any],
    workers: int,
    *args: object,
    timeout: float = 600.0,
    group_timeout: float = 60.0,
    on_report: Callable[[int, Any], None] | None = None,
    hosts: Sequence[Host] | None = None,
) -> list[Any]:
    """Call `function(worker, *args)` in `workers` processes and return their results in rank order.

    Args:
        function: the function to call; it must be importable, because it is sent by name.
        workers: the number of processes.
        args: its arguments after the `Worker`.
        timeout: in seconds; workers that still run then are killed.
        group_timeout: of the process group, for each operation.
        on_report: called with the rank and the argument of `Worker.report`.
        hosts: of the lab, one per worker (`thinwire.tools.lab.namespaces.network`); None: loopback.
    """
    outcomes = start_local(
        function,
        workers,
        *args,
        timeout=timeout,
        group_timeout=group_timeout,
        on_report=on_report,
        hosts=hosts,
    )
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        texts = "\n".join(f"worker {outcome.rank}: {outcome.error}" for outcome in failed)
        raise WorkerFailedError(texts)
    return [outcome.value for outcome in outcomes]


def start_local(
    function: Callable[..., Any],
    workers: int,
    *args: object,
    timeout: float = 600.0,
    group_timeout: float = 60.0,
    on_report: Callable[[int, Any], None] | None = None,
    hosts: Sequence[Host] | None = None,
) -> list[Outcome]:
    """Like `run_local`, but failures are part of the result. No process outlives the call."""
    if hosts is not None and len(hosts) != workers:
        raise ConfigError(f"{workers} workers need as many hosts, not {len(hosts)}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The parent keeps the store on a port that the system picks: no race for ports, no rank that owns it.
    # Hosts cannot reach the parent; they use a file, whose traffic does not count on their interfaces.
    store = None if hosts else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tempfile.TemporaryDirectory(prefix="thinwire-") if hosts else None
    lines: dict[Any, int] = {}
    processes: list[Any] = []
    outcomes = [Outcome(rank) for rank in range(workers)]
    try:
        for rank in range(workers):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_main,
                args=(
                    function,
                    rank,
                    workers,
                    _Rendezvous(
                        store.port if store else 0,
                        f"{folder.name}/store" if folder else None,
                        hosts[rank] if hosts else None,
                    ),
                    group_timeout,
                    theirs,
                    args,
                ),
                daemon=True,
            )
            with _ONE_LOOK:
                process.start()
            theirs.close()
            processes.append(process)
            lines[mine] = rank
        _listen(lines, outcomes, processes, timeout, on_report)
    except BaseException:  # Ctrl-C or a signal: workers have nobody left to report to
        for process in processes:
            process.kill()
        raise
    finally:
        for outcome, process in zip(outcomes, processes, strict=False):
            if not _ended(process, 0.0 if outcome.error else 10.0):
                process.kill()
                _ended(process, None)
        if folder is not None:
            folder.cleanup()
    for outcome, process in zip(outcomes, processes, strict=True):
        with _ONE_LOOK:
            outcome.exit_code = process.exitcode
        if outcome.exit_code != 0 and outcome.error is None:
            outcome.error = f"ended with exit code {outcome.exit_code} without a word"
    return outcomes


def _ended(process: Any, seconds: float | None) -> bool:
    """Whether the process ends within this many seconds."""
    wait([process.sentinel], timeout=seconds)
    with _ONE_LOOK:
        return not process.is_alive()


class _Rendezvous(NamedTuple):
    """Where the workers find the store: a port on loopback or, from inside of hosts, a file."""

    port: int
    path: str | None
    host: Host | None

    def store(self) -> dist.Store:
        if self.path is None:
            return dist.TCPStore("127.0.0.1", self.port, is_master=False)
        return dist.FileStore(self.path)


def _listen(
    lines: dict[Any, int],
    outcomes: list[Outcome],
    processes: list[Any],
    timeout: float,
    on_report: Callable[[int, Any], None] | None,
) -> None:
    deadline = time.monotonic() + timeout
    open_lines = dict(lines)
    while open_lines:
        ready = wait(list(open_lines), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in open_lines.values():
                outcomes[rank].error = f"still running after {timeout:g} seconds"
            return
        for line in cast("list[Connection]", ready):
            rank = open_lines[line]
            try:
                kind, content = pickle.loads(line.recv_bytes())
            except EOFError:
                del open_lines[line]
                _ended(processes[rank], 10.0)
                continue
            if kind == "report":
                if on_report is not None:
                    on_report(rank, content)
            elif kind == "value":
                outcomes[rank].value = content
            else:
                outcomes[rank].error = content


def _main(
    function: Callable[..., Any],
    rank: int,
    size: int,
    rendezvous: _Rendezvous,
    group_timeout: float,
    line: Connection,
    args: tuple[object, ...],
) -> None:
    threading.Thread(target=_end_with_the_parent, name="parent-watch", daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        if rendezvous.host is not None:
            rendezvous.host.enter()
        store = rendezvous.store()
        timeout = timedelta(seconds=group_timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        value = function(Worker(rank, size, line), *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        _send(line, "value", value)
    except BaseException:
        with contextlib.suppress(BrokenPipeError):  # the parent has ended: nobody is left to tell
            _send(line, "error", traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        line.close()


def _end_with_the_parent() -> None:
    """A parent that was killed cannot end its workers, and they may be waiting for something."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
