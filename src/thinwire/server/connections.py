"""The server's connections to its workers, over gloo.

Each connection has a thread: it waits for a message, hands it to the server under a lock, and sends the
answer. There is no queue in between, so an update costs no change of thread. A connection strictly alternates
(one request, one answer, one-way messages apart), so a receive is only pending while the worker owes
something, and its timeout means what it says. While an answer takes long, WAIT is sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from thinwire.errors import PayloadError, PeerError
from thinwire.net.meter import Meter
from thinwire.net.secret import Secret
from thinwire.net.store import own_connection
from thinwire.net.transport import Listener, connect, run
from thinwire.server.admission import RefusedError, admit, context, introduce
from thinwire.server.messages import FINAL, Kind, Message, MessageConnection, with_text
from thinwire.server.options import Agreement
from thinwire.server.record import RunResult
from thinwire.server.server import Server

POLL_SECONDS = 0.05


def _place(name: str, shard: int) -> str:
    return f"thinwire/{name}/{shard}"


class ServerConnections:
    """Lets workers connect to a server and serves them to the end."""

    def __init__(
        self, server: Server, store: Any, name: str, timeout: float, secret: Secret | None = None
    ) -> None:
        self._server, self._timeout, self._secret = server, timeout, secret
        self._context = context(name, server.shard, server.agreement.shards)
        self._listener = Listener(store, _place(name, server.shard))
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._threads: list[threading.Thread] = []
        self._dropped: set[int] = set()
        server.start(self, late_after=timeout, rejoin_within=timeout)

    def run(self, tick: Callable[[], None] | None = None) -> RunResult:
        """Until the run ends; `tick` is called some times a second."""
        self._listener.open()
        try:
            while not self._done.wait(POLL_SECONDS):
                joined = self._listener.joined()
                while len(self._threads) < joined:
                    self._start_thread(len(self._threads) + 1)
                self._call(self._server.tick)
                if tick is not None:
                    tick()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._listener.close()
            self._wait_for_threads()
        if self._error is not None:
            raise self._error
        return self._server.result()

    # --- what the server calls -----------------------------------------------------------------------------

    def send(self, connection: int, message: Message) -> None:
        self._answers[connection].put(message)

    def drop(self, connection: int, reason: str) -> None:
        self._dropped.add(connection)
        self._answers[connection].put(with_text(Kind.FAULT, f"the server has given this worker up: {reason}"))

    def close(self) -> None:
        self._listener.close()

    # --- threads -------------------------------------------------------------------------------------------

    def _start_thread(self, number: int) -> None:
        self._answers[number] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(number,), name=f"thinwire-connection-{number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve(self, number: int) -> None:
        try:
            accepted = self._listener.accept(number, self._timeout, self._server.meter)
            connection = MessageConnection(accepted, self._server.size)
            message = run(admit(connection, self._secret, self._context))
            while True:
                if not self._call(self._server.receive, number, message):
                    self._answers[number].put(self._last_word())
                if not message.one_way or number in self._dropped:
                    answer = self._answer(connection, number)
                    connection.send(answer)
                    if answer.kind in FINAL:
                        return
                message = run(connection.receive())
        except RefusedError as refusal:
            self._call(self._server.refuse, str(refusal))
        except (RuntimeError, PayloadError) as error:  # RuntimeError: a lost peer, or a store that is gone
            self._call(self._server.lose, number, str(error))

    def _answer(self, connection: MessageConnection, number: int) -> Message:
        while True:
            try:
                return self._answers[number].get(timeout=self._timeout / 4)
            except queue.Empty:
                connection.send(Message(Kind.WAIT))

    def _call(self, action: Callable[..., None], *arguments: object) -> bool:
        """Call the server, one thread at a time; False if the run has ended already."""
        with self._lock:
            if self._done.is_set():
                return False
            try:
                action(*arguments)
            except BaseException as error:
                self._end(error)
            if self._server.finished:
                self._done.set()
            return True

    def _end(self, error: BaseException) -> None:
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._done.set()
                for answers in self._answers.values():
                    answers.put(self._last_word())

    def _last_word(self) -> Message:
        if self._error is None:
            return with_text(Kind.REFUSED, "the run is over")
        return with_text(Kind.FAULT, f"the server ended: {self._error}")

    def _wait_for_threads(self) -> None:
        """Give the connections time to send their last message, less if the run failed."""
        deadline = time.monotonic() + (min(self._timeout, 10.0) if self._error is None else 3.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def connect_to_servers(
    agreement: Agreement, store: Any, name: str, timeout: float, meter: Meter, secret: Secret | None = None
) -> list[MessageConnection]:
    """A worker's connections, one to each shard's server."""
    own, connections = own_connection(store), list[MessageConnection]()
    for shard in range(agreement.shards):
        begin, end = agreement.part(shard)
        peer = f"the server of shard {shard}"
        try:
            connection = connect(own, _place(name, shard), timeout, peer=peer, meter=meter)
        except PeerError as error:
            raise PeerError(
                f"finds no server of shard {shard} under the name {name!r}: is it running, with the same "
                f"store and name? It got {error}"
            ) from error
        messages = MessageConnection(connection, end - begin)
        run(introduce(messages, secret, context(name, shard, agreement.shards)))
        connections.append(messages)
    return connections
