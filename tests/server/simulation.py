"""Servers and workers in one process on a virtual clock: the same code, the same bytes, no network.

Runs are reproducible to the last bit, and asynchronous nevertheless: every worker takes as long as it is told
to, so updates arrive in any order and go stale. A deadlock is a failed assertion.
"""

from collections.abc import Callable, Mapping, Sequence

from thinwire.errors import PeerError, ThinwireError
from thinwire.net.meter import Meter
from thinwire.net.transport import LocalConnection, LocalNetwork
from thinwire.server import RunResult
from thinwire.server.messages import Kind, Message, MessageConnection, with_text
from thinwire.server.server import Server
from thinwire.server.worker import Worker


class Simulation:
    """Runs all shards and workers of a run.

    Args:
        servers: one per shard, in order.
        workers: any number; their indices need not be in order.
        seconds: how long a worker (by index) takes for its update of this number; one second by default.
        latency: of every message.
        joins: when workers join, by position in `workers`; at once by default.
        deaths: workers that die, by position, when they are about to send update number so-and-so.
        cut: called with a worker's position, the shard and a message to be sent; True kills the worker.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        workers: Sequence[Worker],
        *,
        seconds: Callable[[int, int], float] = lambda worker, update: 1.0,
        latency: float = 0.01,
        joins: Mapping[int, float] | None = None,
        deaths: Mapping[int, int] | None = None,
        cut: Callable[[int, int, Message], bool] = lambda number, shard, message: False,
    ) -> None:
        self.servers, self.workers = servers, workers
        self.seconds, self.deaths, self.cut = seconds, dict(deaths or {}), cut
        self.network = LocalNetwork(latency)
        self.clock = dict.fromkeys(range(len(workers)), 0.0)
        self.errors: dict[int, BaseException] = {}
        self.final: dict[int, object] = {}
        connections = [_ToWorkers() for _ in servers]
        for server, transport in zip(servers, connections, strict=True):
            server.start(transport)
        for number, worker in enumerate(workers):
            ends: list[LocalConnection] = []
            to_servers: list[MessageConnection] = []
            for shard, server in enumerate(servers):
                names = (f"shard {shard}", f"worker {worker.index}")
                ours, theirs = self.network.pair(names, (server.meter, Meter()))
                connections[shard].ends[number] = MessageConnection(ours, server.size)
                self.network.start(self._serve(server, number, connections[shard].ends[number]))
                ends.append(theirs)
                to_servers.append(_ToServer(self, number, shard, theirs, server.size))
            self.network.start(self._work(number, to_servers), ends, at=(joins or {}).get(number, 0.0))

    def run(self) -> list[RunResult]:
        """To the end; the servers' results."""
        self.network.run()
        assert all(server.finished for server in self.servers), "deadlock: nothing is under way"
        return [server.result() for server in self.servers]

    async def _serve(self, server: Server, number: int, connection: MessageConnection) -> None:
        while True:
            try:
                message = await connection.receive()
            except PeerError:
                if not server.finished:
                    server.lose(number, str(self.errors.get(number)))
                return
            if not server.finished:
                server.receive(number, message)

    async def _work(self, number: int, servers: Sequence[MessageConnection]) -> None:
        try:
            self.final[number] = await self.workers[number].run(servers)
        except ThinwireError as error:
            self.errors[number] = error


class _ToServer(MessageConnection):
    """A worker's connection: its messages leave when it has done its work, or it dies before."""

    def __init__(
        self, simulation: Simulation, number: int, shard: int, connection: LocalConnection, size: int
    ) -> None:
        super().__init__(connection, size)
        self._simulation, self._number, self._shard = simulation, number, shard

    def send(self, message: Message) -> None:
        simulation, number = self._simulation, self._number
        worker, clock = simulation.workers[number], simulation.clock
        dies = message.kind == Kind.UPDATE and simulation.deaths.get(number) == worker.updates
        if dies or simulation.cut(number, self._shard, message):
            raise ThinwireError("killed by the simulation")
        clock[number] = max(clock[number], simulation.network.now)
        if message.kind in (Kind.UPDATE, Kind.PARTIAL) and not message.one_way:
            clock[number] += simulation.seconds(worker.index, worker.updates)
        self.connection.busy_until = clock[number]
        super().send(message)


class _ToWorkers:
    """A server's connections."""

    def __init__(self) -> None:
        self.ends: dict[int, MessageConnection] = {}

    def send(self, connection: int, message: Message) -> None:
        self.ends[connection].send(message)

    def drop(self, connection: int, reason: str) -> None:
        self.ends[connection].send(with_text(Kind.FAULT, f"the server has given this worker up: {reason}"))

    def close(self) -> None:
        pass
