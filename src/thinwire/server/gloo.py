"""The mail over `torch.distributed`: a group of two ranks for every worker and shard.

A death breaks that group alone, and at once. Whoever joins (again) gets a number from the store, and the two
sides meet under a prefix with that number, which was never used before.

The server's side of a link is a thread: it waits for a request, hands it to the server's coroutine under a
lock, and sends the answer. There is no queue between them, so an update costs no change of thread. Work
strictly alternates on a link (one request, one answer, one-way mail apart), so a receive is only pending
while the other side owes something, and its timeout means what it says. While an answer takes long, WAIT is
sent.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from thinwire.errors import DisagreementError, PayloadError, PeerError, ThinwireError
from thinwire.net.liveness import plain
from thinwire.net.meter import Meter
from thinwire.server.mail import Event, Receive, count_received, count_sent
from thinwire.server.messages import (
    FINAL,
    HEADER_BYTES,
    Kind,
    Message,
    capacity,
    pack_into,
    unpack,
    with_text,
)
from thinwire.server.record import RunResult
from thinwire.server.server import Server
from thinwire.server.worker import Worker

POLL_SECONDS = 0.05
SERVER, WORKER = 0, 1


def own_connection(store: Any) -> Any:
    """A connection of our own: another thread may be waiting on the program's."""
    return store.clone() if hasattr(store, "clone") else store


def _place(name: str, shard: int) -> str:
    return f"thinwire/{name}/{shard}"


class Pair:
    """One link: a group of two ranks and a buffer each way."""

    def __init__(
        self, store: Any, prefix: str, me: int, size: int, timeout: float, meter: Meter, peer: str
    ) -> None:
        self._peer_rank, self.peer = 1 - me, peer
        self._meter = meter
        self._out = np.zeros(capacity(size), np.uint8)
        self._in = np.zeros(capacity(size), np.uint8)
        self._out_tensor, self._in_tensor = torch.from_numpy(self._out), torch.from_numpy(self._in)
        self._group = cast(Any, dist).ProcessGroupGloo(
            dist.PrefixStore(prefix, store), me, 2, timedelta(seconds=timeout)
        )

    def send(self, message: Message) -> None:
        end = pack_into(message, self._out)
        self._group.send([self._out_tensor[:end]], self._peer_rank, 0).wait()
        count_sent(self._meter, message)

    def receive(self) -> Message:
        self._in[:HEADER_BYTES] = 0  # what came before is not taken for what comes now
        self._group.recv([self._in_tensor], self._peer_rank, 0).wait()
        message = unpack(self._in, self.peer)
        count_received(self._meter, message)
        return message


class Office:
    """Drives a server's coroutine with the mail of all links."""

    def __init__(self, server: Server, store: Any, name: str, timeout: float) -> None:
        self._server, self._store, self._timeout = server, own_connection(store), timeout
        self._program: Coroutine[Any, Any, RunResult] = server.run(self)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._outcome: RunResult | None = None
        self._error: BaseException | None = None
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._threads: list[threading.Thread] = []
        self._dropped: set[int] = set()
        self._place = _place(name, server.shard)
        self._open = f"{self._place}/open"
        self._incarnation = int(self._store.add(f"{self._place}/incarnations", 1))
        server.late_after = timeout

    def run(self, tick: Callable[[], None] | None = None) -> RunResult:
        """Let workers join and serve them to the end; `tick` is called some times a second."""
        self._program.send(None)
        prefix = f"{self._place}/{self._incarnation}"
        self._store.set(self._open, str(self._incarnation))
        joined = 0
        try:
            while not self._done.wait(POLL_SECONDS):
                total = int(self._store.add(f"{prefix}/joins", 0))
                while joined < total:
                    joined += 1
                    self._start_link(joined, f"{prefix}/link/{joined}")
                self._feed(Event("tick"))
                if tick is not None:
                    tick()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self.close()
            self._say_goodbye()
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise AssertionError("the server ended without a result")
        return self._outcome

    # --- what the server's coroutine calls -----------------------------------------------------------------

    def send(self, link: int, message: Message) -> None:
        self._answers[link].put(message)

    def drop(self, link: int) -> None:
        self._dropped.add(link)
        self._answers[link].put(with_text(Kind.FAULT, "the server has given this worker up"))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            current = self._store.get(self._open) if self._store.check([self._open]) else b""
            if bytes(current).decode() == str(self._incarnation):
                self._store.delete_key(self._open)

    # --- links ---------------------------------------------------------------------------------------------

    def _start_link(self, number: int, prefix: str) -> None:
        self._answers[number] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._serve_link, args=(number, prefix), name=f"thinwire-link-{number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve_link(self, number: int, prefix: str) -> None:
        try:
            store = own_connection(self._store)
            pair = Pair(
                store, prefix, SERVER, self._server.size, self._timeout, self._server.meter, f"link {number}"
            )
            while True:
                message = pair.receive()
                self._feed(Event("mail", number, message))
                if message.one_way and number not in self._dropped:
                    continue
                answer = self._answer(pair, number)
                pair.send(answer)
                if answer.kind in FINAL:
                    return
        except (RuntimeError, PayloadError) as error:  # RuntimeError: torch's own of a broken or silent link
            self._feed(Event("gone", number, reason=_plain(error)))

    def _answer(self, pair: Pair, number: int) -> Message:
        while True:
            try:
                return self._answers[number].get(timeout=self._timeout / 4)
            except queue.Empty:
                pair.send(Message(Kind.WAIT))

    def _feed(self, event: Event) -> None:
        with self._lock:
            if self._done.is_set():
                if event.what == "mail":
                    late = with_text(Kind.REFUSED, "the run is over")
                    self._answers[event.link].put(late if self._error is None else self._fault())
                return
            try:
                self._program.send(event)
            except StopIteration as stop:
                self._outcome = cast(RunResult, stop.value)
                self._done.set()
            except BaseException as error:
                self._end(error, locked=True)

    def _end(self, error: BaseException, *, locked: bool = False) -> None:
        with contextlib.nullcontext() if locked else self._lock:
            if self._error is None and not self._done.is_set():
                self._error = error
                self._done.set()
                for answers in self._answers.values():
                    answers.put(self._fault())

    def _fault(self) -> Message:
        return with_text(Kind.FAULT, f"the server ended: {self._error}")

    def _say_goodbye(self) -> None:
        """Give links the time to send their last word; those that owe us something get less."""
        deadline = time.monotonic() + (min(self._timeout, 10.0) if self._error is None else 3.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._program.close()


class Line:
    """Drives a worker's coroutine: a link to every shard."""

    def __init__(self, worker: Worker, store: Any, name: str, timeout: float, meter: Meter) -> None:
        self._worker, self._timeout = worker, timeout
        own = own_connection(store)
        self._pairs: list[Pair] = []
        for shard in range(worker.agreement.shards):
            begin, end = worker.agreement.part(shard)
            self._pairs.append(self._join(own, name, shard, end - begin, meter))

    def _join(self, store: Any, name: str, shard: int, size: int, meter: Meter) -> Pair:
        place = _place(name, shard)
        try:
            store.wait([f"{place}/open"], timedelta(seconds=self._timeout))
            incarnation = bytes(store.get(f"{place}/open")).decode()
            number = store.add(f"{place}/{incarnation}/joins", 1)
            prefix = f"{place}/{incarnation}/link/{number}"
            return Pair(store, prefix, WORKER, size, self._timeout, meter, f"the server of shard {shard}")
        except RuntimeError as error:
            raise PeerError(
                f"worker {self._worker.index} finds no server of shard {shard} under the name {name!r} "
                f"within {self._timeout:g} s: is it running, with the same store and name? "
                f"Cause: {_plain(error)}"
            ) from error

    def run(self) -> Any:
        program = self._worker.run(self)
        answer: Message | None = None
        try:
            while True:
                try:
                    wish = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = self._receive(cast(Receive, wish).shard)
        finally:
            program.close()

    def send(self, shard: int, message: Message) -> None:
        try:
            self._pairs[shard].send(message)
        except RuntimeError as error:
            if message.kind != Kind.FAULT:
                raise self._lost(shard, error) from error

    def _receive(self, shard: int) -> Message:
        while True:
            try:
                message = self._pairs[shard].receive()
            except RuntimeError as error:
                raise self._lost(shard, error) from error
            if message.kind == Kind.FAULT:
                raise ThinwireError(f"worker {self._worker.index}: {message.text}")
            if message.kind == Kind.REFUSED:
                raise DisagreementError(f"worker {self._worker.index} may not join: {message.text}")
            if message.kind != Kind.WAIT:
                return message

    def _lost(self, shard: int, error: BaseException) -> PeerError:
        return PeerError(
            f"worker {self._worker.index} lost the server of shard {shard} (dead, or silent for "
            f"{self._timeout:g} s): start it again from its checkpoint, then the workers. "
            f"Cause: {_plain(error)}"
        )


def _plain(error: BaseException) -> str:
    return plain(str(error)) or type(error).__name__
