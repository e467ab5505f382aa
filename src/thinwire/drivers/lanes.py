"""Runs programs during the backward pass, first in first out, without a collective in a future's callback.

Why lanes. On gloo, collectives issued from `Future.then` callbacks run on whatever thread completes the
future, so with two buckets two ranks can issue them in opposite order:
  1. rank 0 completes bucket A's first collective and, from its callback, issues A's second;
  2. rank 1 completes bucket B's first collective and issues B's second;
  3. each waits for the other's operation, which is queued behind its own: a deadlock, or, when the sizes
     happen to match, one bucket's numbers in the other's place.
A lane is one thread with a process group of its own. DDP passes buckets in the same order on every rank,
bucket i always goes to lane i mod n, and a lane finishes the rounds of one program before it starts the next.
So the order on each group is equal on all ranks, and between groups no order is needed.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire import log
from thinwire.core.channel import Program
from thinwire.drivers.blocking import drive_until_commit, finish
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.streams import CUDA, Stream, Streams, refuse_capture

EXIT_TIMEOUT = 5.0
"""How long the end of a program waits for the lanes, in seconds."""


class Step:
    """The programs of one backward pass, which commit or abort together.

    A program with state waits here after its last round, until the last one has arrived: only then is it
    known whether every number on every rank was finite.
    """

    def __init__(self, on_end: Callable[[bool], None]) -> None:
        self._on_end: Callable[[bool], None] | None = on_end
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._missing = 1  # the host's own share, given back by `close`
        self._finite = True
        self._error: BaseException | None = None
        self._parked: list[tuple[Job, Callable[[], None]]] = []
        self.committed = True

    def enter(self) -> None:
        with self._lock:
            self._missing += 1

    def close(self, finite: bool = True) -> None:
        """The host has submitted the last program of this step; `finite` if it knows of no other numbers."""
        self._arrive(None, finite, None)

    def finite_so_far(self) -> bool:
        """Before `close`: wait for the rounds of all programs. Whether they have seen only finite numbers."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 1 or self._error is not None)
            return self._finite

    def park(self, job: Job, finite: bool, resume: Callable[[], None]) -> None:
        self._arrive((job, resume), finite, None)

    def leave(self) -> None:
        """A program without state has ended: it has nothing to commit."""
        self._arrive(None, True, None)

    def fail(self, error: BaseException) -> None:
        self._arrive(None, False, error)

    def _arrive(
        self, parked: tuple[Job, Callable[[], None]] | None, finite: bool, error: BaseException | None
    ) -> None:
        with self._lock:
            self._missing -= 1
            self._finite &= finite
            self._error = self._error or error
            if parked is not None:
                self._parked.append(parked)
            self._changed.notify_all()
            failed, released = self._error, self._parked
            if failed is None and self._missing:
                return
            self._parked = []
            self.committed = self._finite
            # A finished step must hold no reference to the host, and through it to the process groups.
            on_end, self._on_end = self._on_end, None
        if failed is not None:
            for job, _ in released:
                job.program.close()
                job.done(failed)
            return
        if on_end is not None:
            on_end(self.committed)
        del on_end
        for _, resume in released:
            resume()


@dataclass
class Job:
    """One program, the step it belongs to, and the callback for its end."""

    program: Program
    step: Step
    done: Callable[[BaseException | None], None]
    device: torch.device


Scope = Callable[[], AbstractContextManager[Any]]
"""Where the work of one job runs; a lane enters it for each part of that work."""


class Lanes:
    """With `overlap=True` a thread per process group; with `overlap=False` the caller's thread.

    With `outlast_steps` programs may be under way when the training loop ends, and are left then. It takes a
    little of the processor's time in every operation.
    """

    def __init__(
        self,
        executors: Sequence[ProcessGroupExecutor],
        *,
        overlap: bool,
        outlast_steps: bool = False,
        streams: Streams = CUDA,
    ) -> None:
        self._wires = list(executors)
        self._on = streams
        self._abandoned = threading.Event()
        if outlast_steps:
            for wire in self._wires:
                wire.leave_when(self._abandoned)
        self._broken: BaseException | None = None
        self._streams: dict[tuple[int, torch.device], Stream] = {}
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._under_way: set[object] = set()
        self.quiet_exit = False
        """Whether nothing is lost if the program ends while an exchange is under way."""
        _open.add(self)
        if overlap:
            for number in range(len(self._wires)):
                self._queues.append(queue.SimpleQueue())
                thread = threading.Thread(
                    target=self._work, args=(number,), name=f"thinwire-lane-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def submit(self, number: int, job: Job) -> None:
        """Submit a program to lane `number` (modulo the number of lanes)."""
        number %= len(self._wires)
        scope = self._scope(number, job.device)
        job.step.enter()
        job = replace(job, done=self._until_done(job.done, scope))
        self._put(number, lambda: self._rounds(number, job, scope))

    def _until_done(
        self, done: Callable[[BaseException | None], None], scope: Scope
    ) -> Callable[[BaseException | None], None]:
        """The job counts as under way until its end is told: the program may end in the same moment.

        The end is told on the lane's stream, whoever tells it: the host's future then waits for that stream.
        """
        key = object()
        self._under_way.add(key)

        def told(error: BaseException | None) -> None:
            self._under_way.discard(key)
            with scope():
                done(error)

        return told

    def close(self) -> None:
        """Let the lanes finish their queues, then end their threads."""
        self._end(None)

    def close_at_exit(self) -> None:
        """The same when the program ends, with a limit. One line says so if an exchange is under way."""
        threads = list(self._threads)
        busy = bool(self._under_way)
        ended = self._end(EXIT_TIMEOUT)
        if not ended:
            for wire in self._wires:
                wire.keep_for_ever()
            self._abandoned.set()
            for thread in threads:
                thread.join(1.0)
        if busy and not self.quiet_exit:
            what = "its result is dropped"
            if ended and self._broken is None:
                what = "it was finished for the other ranks, but nothing is applied here"
            log.warning(
                "the program ends while an exchange is under way: %s. Call session.finish() after the last "
                "step of a schedule, or session.detach()",
                what,
            )

    def _end(self, timeout: float | None) -> bool:
        """End the threads; False if one is still at work after this many seconds."""
        for waiting in self._queues:
            waiting.put(None)
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        self._queues.clear()
        return ended

    def _scope(self, number: int, device: torch.device) -> Scope:
        """On CUDA a stream of the lane's own, behind what the training loop has queued so far."""
        on = self._on
        if device.type not in on.kinds:
            return nullcontext
        refuse_capture(on)
        if (number, device) not in self._streams:
            self._streams[number, device] = on.new(device)
        stream = self._streams[number, device]
        ready = on.record(on.current(device))

        @contextmanager
        def on_stream() -> Generator[None]:
            with on.use(stream):
                on.wait(stream, ready)
                yield

        return on_stream

    def _put(self, number: int, task: Callable[[], None]) -> None:
        if self._queues:
            self._queues[number].put(task)
        else:
            task()

    def _work(self, number: int) -> None:
        tasks = self._queues[number]
        while (task := tasks.get()) is not None:
            task()

    def _rounds(self, number: int, job: Job, scope: Scope) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            with scope():
                commit_request = drive_until_commit(job.program, self._wires[number].execute)
        except BaseException as error:  # handed to the waiting training loop, whatever it is
            self._broken = error
            job.program.close()
            job.step.fail(error)
            job.done(error)
            return
        if commit_request is None:
            job.step.leave()
            job.done(None)
            return
        job.step.park(job, commit_request.finite, lambda: self._put(number, lambda: self._finish(job, scope)))

    def _finish(self, job: Job, scope: Scope) -> None:
        try:
            with scope():
                finish(job.program, job.step.committed)
            job.done(None)
        except BaseException as error:
            self._broken = error
            job.done(error)


_open: weakref.WeakSet[Lanes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter does: it would abort the process if one is inside of torch."""
    for lanes in list(_open):
        lanes.close_at_exit()


def future_for(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future; on CUDA, waiting for it also waits for the stream of the lane."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
