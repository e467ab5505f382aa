"""Point-to-point messages, metered: over gloo groups of two ranks, or between programs in one process.

A program is a coroutine that sends frames on its connections and awaits frames from them. Over gloo an await
blocks, so `run` drives a program to its end; a `LocalNetwork` runs many programs on a virtual clock.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from thinwire.errors import PayloadError, PeerError
from thinwire.net.costs import GLOO_CONTROL
from thinwire.net.liveness import plain
from thinwire.net.meter import Meter, Tally
from thinwire.net.store import own_connection

SERVER, WORKER = 0, 1
"""The two sides of a connection."""
# Of a buffer that is used again: what was in it before must not be taken for a new message.
_CLEARED_BYTES = 64

Result = TypeVar("Result")
Program = Coroutine[Any, Any, Result]


class Connection(ABC):
    """One end of a connection between two peers.

    Args:
        peer: who is at the other end, for errors.
        meter: counts what this end sends and receives, with gloo's control messages (see `costs.py`).
    """

    def __init__(self, peer: str, meter: Meter) -> None:
        self.peer = peer
        self.meter = meter

    def send(self, frame: torch.Tensor, payload_bytes: int, name: str = "send") -> None:
        """Send these bytes. PeerError if the other end is gone."""
        self._send(frame)
        length = frame.numel()
        tally = Tally(1, payload_bytes, length - payload_bytes, length + 2 * GLOO_CONTROL, GLOO_CONTROL)
        self.meter.count(name, tally)

    def count_received(self, length: int, name: str = "receive") -> None:
        """Count a frame that was received: only who reads it knows its length and kind."""
        self.meter.count(name, Tally(1, 0, 0, GLOO_CONTROL, length + 2 * GLOO_CONTROL))

    @abstractmethod
    def _send(self, frame: torch.Tensor) -> None: ...

    @abstractmethod
    async def receive(self, room: int) -> torch.Tensor:
        """A buffer that begins with the next frame, of at most `room` bytes; valid until the next call.

        PeerError if the other end is gone.
        """


# -- between processes -------------------------------------------------------------------------------------


class GlooConnection(Connection):
    """A gloo group of two ranks: a death breaks this connection alone, and at once.

    Args:
        store: of `torch.distributed`.
        prefix: where in the store the two sides find each other; never used before.
        side: SERVER or WORKER.
        timeout: seconds after which a silent peer counts as gone.
    """

    def __init__(
        self, store: Any, prefix: str, side: int, timeout: float, *, peer: str, meter: Meter
    ) -> None:
        super().__init__(peer, meter)
        self._other, self._timeout = 1 - side, timeout
        self._buffer = torch.zeros(0, dtype=torch.uint8)
        with self._watched():
            self._group = cast(Any, dist).ProcessGroupGloo(
                dist.PrefixStore(prefix, store), side, 2, timedelta(seconds=timeout)
            )

    def _send(self, frame: torch.Tensor) -> None:
        with self._watched():
            self._group.send([frame], self._other, 0).wait()

    async def receive(self, room: int) -> torch.Tensor:
        if self._buffer.numel() != room:
            self._buffer = torch.zeros(room, dtype=torch.uint8)
        self._buffer[:_CLEARED_BYTES] = 0
        with self._watched():
            self._group.recv([self._buffer], self._other, 0).wait()
        return self._buffer

    @contextlib.contextmanager
    def _watched(self) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:  # torch's own of a broken or silent connection
            cause = plain(str(error)) or type(error).__name__
            raise PeerError(
                f"lost {self.peer} (dead, or silent for {self._timeout:g} s). Cause: {cause}"
            ) from error


class Listener:
    """A server's place in a store, where workers connect, early or late, again and again.

    Every connection gets a number from the store, and the two sides find each other under a prefix with that
    number. A server that was started again listens under a new number of its own.
    """

    def __init__(self, store: Any, place: str) -> None:
        self._store = own_connection(store)
        self._open = f"{place}/open"
        self._incarnation = str(self._store.add(f"{place}/incarnations", 1))
        self._prefix = f"{place}/{self._incarnation}"

    def open(self) -> None:
        self._store.set(self._open, self._incarnation)

    def joined(self) -> int:
        """How many workers have asked for a connection so far."""
        return int(self._store.add(f"{self._prefix}/joins", 0))

    def accept(self, number: int, timeout: float, meter: Meter) -> GlooConnection:
        """The connection to the worker that asked as number so-and-so, from 1."""
        store, prefix = own_connection(self._store), f"{self._prefix}/{number}"
        return GlooConnection(store, prefix, SERVER, timeout, peer=f"worker connection {number}", meter=meter)

    def close(self) -> None:
        """Let no worker join any more, unless another server listens here already."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            current = self._store.get(self._open) if self._store.check([self._open]) else b""
            if bytes(current).decode() == self._incarnation:
                self._store.delete_key(self._open)


def connect(store: Any, place: str, timeout: float, *, peer: str, meter: Meter) -> GlooConnection:
    """Connect to the server that listens at this place. PeerError if there is none within the timeout."""
    try:
        store.wait([f"{place}/open"], timedelta(seconds=timeout))
        incarnation = bytes(store.get(f"{place}/open")).decode()
        number = store.add(f"{place}/{incarnation}/joins", 1)
    except RuntimeError as error:
        raise PeerError(f"no answer from {peer} within {timeout:g} s. Cause: {plain(str(error))}") from error
    return GlooConnection(store, f"{place}/{incarnation}/{number}", WORKER, timeout, peer=peer, meter=meter)


def run(program: Program[Result]) -> Result:
    """Run a program whose connections block."""
    try:
        program.send(None)
    except StopIteration as stop:
        return cast(Result, stop.value)
    finally:
        program.close()
    raise AssertionError("a program waits for something that is not a connection between processes")


# -- in one process ----------------------------------------------------------------------------------------


class LocalNetwork:
    """Programs in one process: the same frames and the same byte counts, reproducible to the last bit.

    Args:
        latency: seconds from sending to arrival, on the virtual clock.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ends: dict[Program[None], Sequence[LocalConnection]] = {}
        self._waiting: dict[Program[None], LocalConnection] = {}

    def pair(
        self, names: tuple[str, str], meters: tuple[Meter, Meter]
    ) -> tuple[LocalConnection, LocalConnection]:
        """The two ends of a new connection between these two, each with its meter."""
        first, second = LocalConnection(self, names[1], meters[0]), LocalConnection(self, names[0], meters[1])
        first.other, second.other = second, first
        return first, second

    def start(
        self, program: Program[None], connections: Sequence[LocalConnection] = (), at: float = 0.0
    ) -> None:
        """Run a program from this time on; when it ends, these connections are closed."""
        self._ends[program] = connections
        self.at(at, lambda: self.resume(program, None))

    def run(self) -> None:
        """Until nothing is under way. AssertionError if programs still wait then: a deadlock."""
        try:
            while self._events:
                self.now, _, action = heapq.heappop(self._events)
                action()
            if self._waiting:
                peers = ", ".join(connection.peer for connection in self._waiting.values())
                raise AssertionError(f"deadlock: nothing is under way, and programs wait for {peers}")
        finally:
            for program in self._ends:
                program.close()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def resume(self, program: Program[None], arrived: torch.Tensor | PeerError | None) -> None:
        self._waiting.pop(program, None)
        try:
            failed = isinstance(arrived, PeerError)
            connection: LocalConnection = program.throw(arrived) if failed else program.send(arrived)
        except StopIteration:
            for connection in self._ends[program]:
                connection.close()
            return
        self._waiting[program] = connection
        connection.wake(program)


class LocalConnection(Connection):
    """One end of a connection within a `LocalNetwork`."""

    other: LocalConnection

    def __init__(self, network: LocalNetwork, peer: str, meter: Meter) -> None:
        super().__init__(peer, meter)
        self.busy_until = 0.0
        """On the virtual clock: what this end sends leaves no earlier."""
        self._network = network
        self._arrived: deque[torch.Tensor | PeerError] = deque()
        self._waiting: Program[None] | None = None

    def _send(self, frame: torch.Tensor) -> None:
        self._deliver(frame.clone())

    def close(self) -> None:
        self._deliver(PeerError(f"lost {self.other.peer}: it has ended"))

    def _deliver(self, what: torch.Tensor | PeerError) -> None:
        network = self._network
        network.at(max(network.now, self.busy_until) + network.latency, lambda: self.other.arrive(what))

    def arrive(self, what: torch.Tensor | PeerError) -> None:
        program, self._waiting = self._waiting, None
        if program is None:
            self._arrived.append(what)
        else:
            self._network.resume(program, what)

    def wake(self, program: Program[None]) -> None:
        """Go on with this program as soon as something has arrived."""
        if self._arrived:
            first = self._arrived.popleft()
            self._network.at(self._network.now, lambda: self._network.resume(program, first))
        else:
            self._waiting = program

    async def receive(self, room: int) -> torch.Tensor:
        frame = await self
        if frame.numel() > room:
            raise PayloadError(f"a frame of {frame.numel()} bytes from {self.peer}, where {room} have room")
        return frame

    def __await__(self) -> Generator[LocalConnection, torch.Tensor, torch.Tensor]:
        """Hands this connection to the network, which resumes the program with what arrives on it."""
        return (yield self)
