"""Servers and workers in one process on a virtual clock: the same coroutines, the same bytes, no network.

Runs are reproducible to the last bit, and asynchronous nevertheless: every worker takes as long as it is
told to, so updates arrive in any order and go stale. A deadlock is a failed assertion.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from thinwire.errors import DisagreementError, ThinwireError
from thinwire.server.mail import Event, Receive, count_received, count_sent
from thinwire.server.messages import Kind, Message, pack_into, unpack
from thinwire.server.record import RunResult
from thinwire.server.server import Server
from thinwire.server.worker import Worker

Seconds = Callable[[int, int], float]
"""How long a worker (by index) takes for its update of this number."""

_BUSY = (Kind.UPDATE, Kind.PARTIAL)


class Scheduler:
    """Runs all shards and workers of a run.

    Args:
        servers: one per shard, in order.
        workers: any number; their indices need not be in order.
        seconds: how long updates (and sums) take; one second each by default.
        latency: of every mail.
        joins: when workers join, by position in `workers`; at once by default.
        deaths: workers that die, by position, when they are about to send update number so-and-so.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        workers: Sequence[Worker],
        *,
        seconds: Seconds = lambda worker, update: 1.0,
        latency: float = 0.01,
        joins: Mapping[int, float] | None = None,
        deaths: Mapping[int, int] | None = None,
    ) -> None:
        self.servers, self.workers = servers, workers
        self._seconds, self._latency, self._deaths = seconds, latency, dict(deaths or {})
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._clock = dict.fromkeys(range(len(workers)), 0.0)
        self._now = 0.0
        self._results: list[RunResult | None] = [None] * len(servers)
        self._boxes: dict[tuple[int, int], deque[Message]] = {}
        self._awaited: dict[int, int] = {}
        self._dead: set[int] = set()
        self.errors: dict[int, BaseException] = {}
        self.final: dict[int, Any] = {}
        self._programs = [worker.run(_Pen(self, number)) for number, worker in enumerate(workers)]
        self._served = [server.run(_Desk(self, shard)) for shard, server in enumerate(servers)]
        for program in self._served:
            program.send(None)
        for number in range(len(workers)):
            self._at((joins or {}).get(number, 0.0), lambda number=number: self._resume(number, None))

    def run(self) -> list[RunResult]:
        """To the end; the servers' results."""
        try:
            while self._events:
                self._now, _, action = heapq.heappop(self._events)
                action()
        finally:
            for program in (*self._programs, *self._served):
                program.close()
        if any(result is None for result in self._results):
            waiting = {number: f"for shard {shard}" for number, shard in self._awaited.items()}
            raise AssertionError(f"deadlock: nothing is under way, workers wait {waiting}")
        return cast("list[RunResult]", self._results)

    # --- workers -------------------------------------------------------------------------------------------

    def _resume(self, number: int, answer: Message | None) -> None:
        if number in self._dead:
            return
        self._clock[number] = max(self._clock[number], self._now)
        try:
            wish = cast(Receive, self._programs[number].send(cast(Any, answer)))
        except StopIteration as stop:
            self.final[number] = stop.value
            return
        except ThinwireError as error:
            self._die(number, error)
            return
        if number in self._dead:
            return
        box = self._boxes.setdefault((number, wish.shard), deque())
        if box:
            first = box.popleft()
            self._at(self._now, lambda: self._resume(number, first))
        else:
            self._awaited[number] = wish.shard

    def send_up(self, number: int, shard: int, message: Message) -> None:
        """A worker writes: the mail leaves when it has done its work."""
        if number in self._dead:
            return
        worker = self.workers[number]
        if message.kind == Kind.UPDATE and self._deaths.get(number) == worker.updates:
            self._die(number, ThinwireError("killed by the scheduler"))
            return
        if message.kind in _BUSY and not message.one_way:
            self._clock[number] += self._seconds(worker.index, worker.updates)
        carried = self._carry(message, self.servers[shard].size, f"worker {worker.index}")
        server = self.servers[shard]

        def arrive() -> None:
            count_received(server.meter, carried)
            self._feed(shard, Event("mail", number, carried))

        self._at(self._clock[number] + self._latency, arrive)

    def _die(self, number: int, error: BaseException) -> None:
        self._dead.add(number)
        self._awaited.pop(number, None)
        self.errors[number] = error
        for shard in range(len(self.servers)):
            gone = Event("gone", number, reason=str(error))
            self._at(
                max(self._now, self._clock[number]) + self._latency,
                lambda shard=shard, gone=gone: self._feed(shard, gone),
            )

    # --- servers -------------------------------------------------------------------------------------------

    def _feed(self, shard: int, event: Event) -> None:
        if self._results[shard] is None:
            try:
                self._served[shard].send(event)
            except StopIteration as stop:
                self._results[shard] = cast(RunResult, stop.value)

    def send_down(self, shard: int, number: int, message: Message) -> None:
        if number in self._dead:
            return
        count_sent(self.servers[shard].meter, message)
        carried = self._carry(message, self.servers[shard].size, f"shard {shard}")

        def arrive() -> None:
            if carried.kind in (Kind.REFUSED, Kind.FAULT):
                self._die(number, DisagreementError(carried.text))
            elif self._awaited.get(number) == shard:
                del self._awaited[number]
                self._resume(number, carried)
            else:
                self._boxes.setdefault((number, shard), deque()).append(carried)

        self._at(self._now + self._latency, arrive)

    def _carry(self, message: Message, size: int, source: str) -> Message:
        """Through bytes, as on a network."""
        buffer = np.zeros(message.length, np.uint8)
        pack_into(message, buffer)
        del size
        return unpack(buffer, source)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))


class _Pen:
    """A worker's mail."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self._scheduler, self._number = scheduler, number

    def send(self, shard: int, message: Message) -> None:
        self._scheduler.send_up(self._number, shard, message)


class _Desk:
    """A server's mail."""

    def __init__(self, scheduler: Scheduler, shard: int) -> None:
        self._scheduler, self._shard = scheduler, shard

    def send(self, link: int, message: Message) -> None:
        self._scheduler.send_down(self._shard, link, message)

    def drop(self, link: int) -> None:
        del link

    def close(self) -> None:
        pass
