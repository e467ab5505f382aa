"""Counts network traffic: every operation, its bytes in both directions, its rounds and its time."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections import deque
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Asked = TypeVar("Asked")
INSIDE = "host "
"""Before the names of operations between the ranks of one host."""


class Tally(NamedTuple):
    """Totals of one kind of operation, or of all."""

    operations: int = 0
    payload_bytes: int = 0
    overhead_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Tally) -> Tally:
        return Tally._make(map(operator.add, self, other))

    def minus(self, other: Tally) -> Tally:
        return Tally._make(map(operator.sub, self, other))


class Finished(NamedTuple):
    """An operation that has ended; the seconds of its tally are not filled in yet."""

    operation: str
    tally: Tally
    began: float
    ended: float


@dataclass
class Meter:
    """The traffic of one rank so far, without what sets up a session.

    That is the handshake, and the round at the first step, or after a checkpoint was loaded, in which the
    ranks confirm that all are at the same step.

    - `payload_bytes`: the bytes that methods pass to the channel, before a collective multiplies them;
    - `overhead_bytes`: frame headers and length tables around them;
    - `sent_bytes`, `received_bytes`: the bytes that this rank's network interface carries, without TCP/IP
      headers, by the algorithms that the backend uses and, on gloo, with its control messages (see
      `costs.py`);
    - `rounds`: collectives issued one after the other; `steps`: averaged steps, aborted ones included;
      `skipped_steps`: those that were aborted;
    - `seconds`: the sum over all operations, overlapping ones included; `network_seconds`: the time in which
      at least one operation was in flight;
    - `work_seconds`: the time of the methods themselves, from receiving a tensor to its result, without the
      time in operations;
    - `inside`: the operations between the ranks of one host (`hierarchical`), whose bytes do not pass the
      network interface. They are not part of the numbers above, except for `network_seconds`.
    """

    steps: int = 0
    skipped_steps: int = 0
    work_seconds: float = 0.0
    network_seconds: float = 0.0
    by_operation: dict[str, Tally] = field(default_factory=dict[str, Tally])
    finished: deque[Finished] = field(default_factory=deque["Finished"], repr=False)
    """Operations that are counted with their step: where they end there is no time for it."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _counted_until: float = field(default=0.0, repr=False)

    def count(
        self, operation: str, tally: Tally, ended: float | None = None, *, inside: bool = False
    ) -> None:
        """`ended` is the end of the operation by `time.perf_counter()`, if that clock was used."""
        if inside:
            operation = INSIDE + operation
        with self._lock:
            self._add(operation, tally)
            if ended is not None:
                self._add_time(ended - tally.seconds, ended)

    def _add(self, operation: str, tally: Tally) -> None:
        self.by_operation[operation] = self.by_operation.get(operation, Tally()).plus(tally)

    def _add_time(self, began: float, ended: float) -> None:
        # Operations are counted as they end, so what overlaps lies before the last end.
        self.network_seconds += max(0.0, ended - max(began, self._counted_until))
        self._counted_until = max(ended, self._counted_until)

    def _count_finished(self) -> None:
        """With the lock."""
        while self.finished:
            operation, tally, began, ended = self.finished.popleft()
            self._add(operation, tally._replace(seconds=ended - began))
            self._add_time(began, ended)

    def count_step(self, *, skipped: bool = False) -> None:
        """Count one step."""
        with self._lock:
            self._count_finished()
            self.steps += 1
            self.skipped_steps += skipped

    def count_work(self, seconds: float) -> None:
        """Count the time of a method's own work."""
        with self._lock:
            self.work_seconds += seconds

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self.finished.clear()
            self.steps = 0
            self.skipped_steps = 0
            self.work_seconds = 0.0
            self.network_seconds = 0.0
            self.by_operation.clear()

    def save(self) -> dict[str, Any]:
        """All counters, for a checkpoint."""
        with self._lock:
            self._count_finished()
            return {
                "steps": self.steps,
                "skipped_steps": self.skipped_steps,
                "work_seconds": self.work_seconds,
                "network_seconds": self.network_seconds,
                "by_operation": {name: tally._asdict() for name, tally in self.by_operation.items()},
            }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from the counters that `save` returned."""
        with self._lock:
            self.steps, self.skipped_steps = saved["steps"], saved["skipped_steps"]
            self.work_seconds, self.network_seconds = saved["work_seconds"], saved["network_seconds"]
            self.by_operation = {name: Tally(**tally) for name, tally in saved["by_operation"].items()}

    def __str__(self) -> str:
        """A short table: bytes by operation, all together, and per step."""
        total = self.total
        known = sorted(self.by_operation.items())
        rows = [(name, tally) for name, tally in known if not name.startswith(INSIDE)]
        if len(rows) > 1:
            rows.append(("total", total))
        rows += [(name, tally) for name, tally in known if name.startswith(INSIDE)]
        lines = [f"{'bytes':<16}{'operations':>10}{'payload':>16}{'sent':>16}{'received':>16}"]
        for name, tally in rows:
            sizes = (tally.payload_bytes + tally.overhead_bytes, tally.sent_bytes, tally.received_bytes)
            lines.append(f"{name:<16}{tally.operations:>10,}" + "".join(f"{size:>16,}" for size in sizes))
        if self.steps:
            sizes = (total.payload_bytes + total.overhead_bytes, total.sent_bytes, total.received_bytes)
            cells = "".join(f"{size / self.steps:>16,.0f}" for size in sizes)
            lines.append(f"{'per step':<16}{total.operations / self.steps:>10,.4g}{cells}")
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        lines.append(
            f"{steps}, {self.network_seconds:.3g} s on the network, {self.work_seconds:.3g} s of compression"
        )
        return "\n".join(lines)

    @property
    def total(self) -> Tally:
        """The totals of all operations over the network."""
        return self._sum(inside=False)

    @property
    def inside(self) -> Tally:
        """The totals of all operations inside the host."""
        return self._sum(inside=True)

    def _sum(self, *, inside: bool) -> Tally:
        with self._lock:
            self._count_finished()
            counted = [t for name, t in self.by_operation.items() if name.startswith(INSIDE) is inside]
        return functools.reduce(Tally.plus, counted, Tally())

    @property
    def payload_bytes(self) -> int:
        """Bytes that methods passed to the channel."""
        return self.total.payload_bytes

    @property
    def overhead_bytes(self) -> int:
        """Frame headers and length tables."""
        return self.total.overhead_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank's network interface sent."""
        return self.total.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank's network interface received."""
        return self.total.received_bytes

    @property
    def rounds(self) -> int:
        """Collectives issued so far."""
        return self.total.operations

    @property
    def seconds(self) -> float:
        """The time of all operations added up, overlapping ones included."""
        return self.total.seconds


class Timed(Coroutine[Asked, Any, None]):
    """A program whose own time is counted: the time between an answer and the next request."""

    def __init__(self, program: Coroutine[Asked, Any, None], meter: Meter) -> None:
        self._program = program
        self._meter = meter

    def send(self, value: Any, /) -> Asked:
        begin = time.perf_counter()
        try:
            return self._program.send(value)
        finally:
            self._meter.count_work(time.perf_counter() - begin)

    def throw(self, *error: Any) -> Asked:
        return self._program.throw(*error)

    def close(self) -> None:
        self._program.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._program.__await__()
