"""The server: keeps a shard of the parameters and takes updates in the order of their arrival.

An epoch has two phases. First every worker gets the snapshot x~ and sums the gradients of its chunk of the
rows. Then the server gives out parameters and takes updates until `epoch_length` are given out.

Staleness. Every worker that has parameters and has not answered holds a ticket with the version t it got.
An update is applied at once if all others can still be applied in time, whatever comes: with the other
tickets sorted by age, the i-th oldest (from 0) will come at t + 1 + i at the earliest, which must be at most
`max_staleness` after its version. Otherwise it waits. The oldest ticket's update can always be applied, so
there is always progress, and no more than max_staleness + 1 tickets are out.

Shards. Only shard 0 counts the epoch's updates. Workers get parameters from the shards one after the other,
in their order, and hold no ticket of a later shard while they wait for an earlier one: no circle of waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire import log
from thinwire.errors import ConfigError, PayloadError, PeerError, ThinwireError
from thinwire.kernels.cpu import grid
from thinwire.kernels.generator import mix64
from thinwire.net.meter import Meter
from thinwire.server import quantiser
from thinwire.server.bound import NormBound
from thinwire.server.messages import Kind, Message, open_partial, with_text
from thinwire.server.options import Agreement
from thinwire.server.quantiser import Coded
from thinwire.server.record import EpochRecord, Point, RunResult

Vector = NDArray[Any]
LARGEST_COUNT = 2**32 - 1


class ServerTransport(Protocol):
    """How a server reaches its workers, by the numbers of their connections. Nothing here waits."""

    def send(self, connection: int, message: Message) -> None: ...

    def drop(self, connection: int, reason: str) -> None:
        """Give a worker up, and tell it why."""
        ...

    def close(self) -> None:
        """Let no worker join any more."""
        ...


@dataclass
class ServerState:
    """All that a server must remember to go on: what a checkpoint holds."""

    x: Vector
    y: Vector  # the iterate that steps are taken on; x itself unless accelerated
    snapshot: Vector
    full: Vector  # the full gradient at the snapshot
    total: NDArray[np.float64]  # the sum of all x of this epoch, if accelerated
    staleness: NDArray[np.int64]  # how many updates were so and so stale
    epoch: int = 0
    version: int = 0  # updates applied so far
    applied: int = 0  # of them in this epoch
    summed: bool = False  # whether `full` belongs to the snapshot
    bits_down: int = 0
    bits_up: int = 0
    history: list[EpochRecord] = field(default_factory=list[EpochRecord])


@dataclass
class Peer:
    """A worker that has joined on a connection."""

    connection: int
    index: int
    waiting: bool = False  # for parameters, or for a chunk
    since: int = 0  # who waits longest is served first
    finished: bool = False  # with this epoch
    ticket: int | None = None  # the version of the parameters that it has
    update: Coded | None = None  # arrived, but not applied yet
    chunk: int | None = None


class Server:
    """One shard. A transport calls `start`, then `receive`, `lose` and `tick`, until it is `finished`.

    Args:
        agreement: what server and workers have in common.
        shard, workers, min_workers, on_epoch: as for `thinwire.server.serve`.
        start: this shard's parameters.
        meter: where the transport counts bytes, for the record.
        on_update: called after every update with the version and the parameters (for tests).
        on_save: called whenever the state is worth keeping: at every epoch, and every `save_every` updates.
        trace_every: add a point to `points` every so many updates.
        reject_above: as for `thinwire.server.serve`.
    """

    def __init__(
        self,
        agreement: Agreement,
        shard: int,
        start: Vector,
        *,
        workers: int,
        min_workers: int = 1,
        meter: Meter | None = None,
        on_update: Callable[[int, Vector], None] | None = None,
        on_epoch: Callable[[EpochRecord], None] | None = None,
        on_save: Callable[[Server], None] | None = None,
        save_every: int | None = None,
        trace_every: int | None = None,
        reject_above: float = math.inf,
    ) -> None:
        if not 1 <= min_workers <= workers:
            raise ConfigError(
                f"asylpg: min_workers must be from 1 to the {workers} workers, not {min_workers}"
            )
        self.agreement, self.options, self.shard = agreement, agreement.options, shard
        begin, end = agreement.part(shard)
        if len(start) != end - begin:
            raise ConfigError(f"shard {shard} has {end - begin} parameters, not {len(start)}")
        self.size = len(start)
        self.workers, self.min_workers = workers, min_workers
        self.meter = meter if meter is not None else Meter()
        staleness = np.zeros(self.options.max_staleness + 1, np.int64)
        self.state = ServerState(start, start, start, np.zeros_like(start), np.zeros(self.size), staleness)
        self._begin_epoch(start)
        self.peers: dict[int, Peer] = {}
        self.lost: list[str] = []
        self.dropped = self.discarded = 0
        self.rejected: dict[int, int] = {}
        self._bound = NormBound(reject_above)
        self._on_update, self._on_epoch, self._on_save = on_update, on_epoch, on_save
        self._save_every, self._trace_every = save_every, trace_every
        self.points: list[Point] = []
        self._turn = 0
        self._bits_then = (0, 0, 0)
        self._wire_before = 0
        self._chunks: dict[int, tuple[float, Vector]] = {}
        self._running = self._over = False
        self._refusal = ""
        self._started, self._late_after = time.monotonic(), math.inf
        self._short_since, self._rejoin_within = math.inf, 0.0
        self._scratch = np.zeros(self.size, self.state.x.dtype)
        self._transport: ServerTransport

    # --- what a transport calls ----------------------------------------------------------------------------

    def start(
        self, transport: ServerTransport, late_after: float = math.inf, rejoin_within: float = 0.0
    ) -> None:
        """Begin when all workers have joined, or with enough of them after `late_after` seconds.

        When too few are left, one may come back within `rejoin_within` seconds before the run ends.
        """
        self._transport, self._late_after, self._rejoin_within = transport, late_after, rejoin_within

    def receive(self, connection: int, message: Message) -> None:
        """A message of a worker. One whose message cannot be used is given up."""
        try:
            self._take(connection, message)
        except PayloadError as error:
            self.lose(connection, f"sent what cannot be used: {error}")
            self._transport.drop(connection, str(error))

    def lose(self, connection: int, reason: str) -> None:
        """A connection is gone."""
        peer = self.peers.pop(connection, None)
        if peer is None or self._over:
            return
        self._count_lost(peer, reason)
        self._end_if_short()
        self._apply_ready()
        self._answer_all()
        self._end_epoch_if_finished()

    def refuse(self, reason: str) -> None:
        """A worker was turned away before it could say who it is."""
        self._refusal = reason
        log.warning("shard %d refused a worker: %s", self.shard, reason)

    def tick(self) -> None:
        """Time has passed."""
        self._begin_if_ready()
        self._end_if_short()

    @property
    def finished(self) -> bool:
        return self._over and not self.peers

    @property
    def tickets(self) -> int:
        """How many workers hold parameters that they have not answered."""
        return sum(peer.ticket is not None for peer in self.peers.values())

    def result(self) -> RunResult:
        state = self.state
        about = state.history, state.staleness, state.version, self.dropped, self.discarded, self.lost
        return RunResult(state.snapshot.copy(), *about, self.meter, rejected=dict(self.rejected))

    def restore(self, state: ServerState) -> None:
        """Go on from a checkpoint; before `start`."""
        self.state = state
        if self.options.variant != "accelerated":
            state.y = state.x
        if state.history:
            last = state.history[-1]
            self._bits_then = (last.bits_down, last.bits_up, last.wire_bytes)
            self._wire_before = last.wire_bytes

    # --- joining -------------------------------------------------------------------------------------------

    def _take(self, connection: int, message: Message) -> None:
        peer, kind = self.peers.get(connection), message.kind
        if kind == Kind.HELLO:
            if peer is not None:
                raise PayloadError("a second greeting")
            self._join(connection, message)
            return
        if peer is None:
            return  # given up already
        if kind == Kind.FAULT:
            raise ThinwireError(f"worker {peer.index}: {message.text}")
        owes = peer.ticket is not None and peer.update is None
        if owes and kind != Kind.UPDATE and message.epoch == self.state.epoch:
            raise PayloadError(f"{kind.name}, but an update is due")
        if kind == Kind.FINISHED:
            if message.epoch == self.state.epoch:
                peer.finished = True
                self._end_epoch_if_finished()
            else:
                self._send_snapshot(peer)
            return
        if kind == Kind.UPDATE:
            self._update(peer, message)
        elif kind == Kind.PARTIAL:
            self._partial(peer, message)
        elif kind != Kind.ASK:
            raise PayloadError(f"{kind.name} is nothing that a worker sends")
        if not message.one_way:
            self._turn += 1
            peer.waiting, peer.since = True, self._turn
        self._answer_all()

    def _join(self, connection: int, message: Message) -> None:
        index, workers = message.version, self.agreement.chunks
        reason = self.agreement.difference(message.text) or ("the run is over" if self._over else "")
        if not reason and index >= workers:
            reason = f"its index is {index}, and the {workers} workers have indices from 0 to {workers - 1}"
        if reason:
            self.refuse(reason)
            self._send(connection, with_text(Kind.REFUSED, reason))
            return
        before = [other for other in self.peers.values() if other.index == index]
        peer = self.peers[connection] = Peer(connection, index)
        for old in before:  # it restarted before its old connection was seen to break, or there are two of it
            del self.peers[old.connection]
            self._count_lost(old, "was replaced by a worker that joined with its index")
            self._transport.drop(old.connection, f"another worker has joined with its index {index}")
        if not self._running:
            self._begin_if_ready()
            return
        self._end_if_short()
        self._send_snapshot(peer)
        if before:
            self._apply_ready()
            self._answer_all()

    def _count_lost(self, peer: Peer, reason: str) -> None:
        self.lost.append(f"worker {peer.index}: {reason}")
        log.warning("shard %d lost worker %d (%s); %d left", self.shard, peer.index, reason, len(self.peers))
        if peer.ticket is not None:
            self.dropped += 1

    def _end_if_short(self) -> None:
        """PeerError if there have been too few workers for too long."""
        if not self._running or self._over or len(self.peers) >= self.min_workers:
            self._short_since = math.inf
            return
        now = time.monotonic()
        self._short_since = min(self._short_since, now)
        if now - self._short_since >= self._rejoin_within:
            raise PeerError(
                f"shard {self.shard} has {len(self.peers)} workers left and min_workers is "
                f"{self.min_workers}: {'; '.join(self.lost)}"
            )

    def _begin_if_ready(self) -> None:
        late = time.monotonic() - self._started > self._late_after
        if self._running or (len(self.peers) < self.workers and not late):
            return
        if len(self.peers) < self.min_workers:
            why = f" (one was refused: {self._refusal})" if self._refusal else ""
            raise PeerError(
                f"only {len(self.peers)} of {self.workers} workers joined shard {self.shard} within "
                f"{self._late_after:g} s, and min_workers is {self.min_workers}{why}"
            )
        self._running = True
        for peer in self.peers.values():
            self._send_snapshot(peer)
        if self.state.summed and self.state.epoch >= self.options.epochs:
            self._finish()  # the checkpoint was of a run at its end

    # --- epochs --------------------------------------------------------------------------------------------

    def _begin_epoch(self, x: Vector) -> None:
        """x~ = x, rounded to float32 as it will travel, so that all have the same."""
        state = self.state
        with np.errstate(over="ignore"):
            state.snapshot = x.astype(np.float32).astype(x.dtype)
        if not bool(np.isfinite(state.snapshot).all()):
            raise self._diverged()
        state.x = state.snapshot.copy()
        state.total = np.zeros(self.size)
        if self.options.variant != "accelerated":
            state.y = state.x
        elif state.epoch == 0:
            state.y = state.x.copy()
        else:  # y goes on from epoch to epoch
            theta = self.options.theta(state.epoch)
            grid.couple(state.x, state.y, state.snapshot, theta, np.zeros(self.size))
        state.applied = 0
        state.summed = False

    def _send_snapshot(self, peer: Peer) -> None:
        state = self.state
        peer.finished = peer.waiting = False
        peer.chunk = None if state.summed else self._next_chunk(peer)
        state.bits_down += 32 * self.size
        version = 0 if peer.chunk is None else peer.chunk + 1
        message = Message(Kind.SNAPSHOT, state.epoch, version, quantiser.raw(state.snapshot))
        self._send(peer.connection, message)

    def _next_chunk(self, peer: Peer) -> int | None:
        """Its own chunk, or one whose owner is not there."""
        taken = {p.chunk for p in self.peers.values()} | set(self._chunks)
        owners = {p.index for p in self.peers.values()} - {peer.index}
        free = [c for c in range(self.agreement.chunks) if c not in taken and c not in owners]
        return peer.index if peer.index in free else (free[0] if free else None)

    def _partial(self, peer: Peer, message: Message) -> None:
        state, chunks = self.state, self.agreement.chunks
        if message.epoch != state.epoch or state.summed:
            self.discarded += 1
            return
        if not 0 <= message.version < chunks:
            raise PayloadError(f"chunk {message.version} of {chunks} does not exist")
        loss, gradient = open_partial(message, self.size)
        state.bits_up += 32 * self.size
        self._chunks.setdefault(message.version, (loss, gradient))
        peer.chunk = None
        if len(self._chunks) == chunks:
            self._end_summing()

    def _end_summing(self) -> None:
        state, rows = self.state, self.agreement.rows
        full, loss = np.zeros(self.size), 0.0
        for chunk in sorted(self._chunks):  # in this order, whoever came first
            loss += self._chunks[chunk][0]
            full += self._chunks[chunk][1]
        state.full = (full / rows).astype(state.x.dtype)
        state.summed = True
        self._chunks.clear()
        record = self._record(loss / rows, self._bits_then)
        state.history.append(record)
        if not math.isfinite(record.objective):
            raise ThinwireError(f"the objective is {record.objective} at epoch {state.epoch}: lower lr")
        if self._on_epoch is not None:
            self._on_epoch(record)
        self._save()
        if state.epoch >= self.options.epochs:
            self._finish()

    def _end_epoch_if_finished(self) -> None:
        state = self.state
        if not self._running or not state.summed or self._over or not self.peers:
            return
        if not all(peer.finished for peer in self.peers.values()):
            return
        x, self._bits_then = self._output(), self._bits()
        state.epoch += 1
        self._begin_epoch(x)
        self._chunks.clear()
        for peer in self.peers.values():
            self._send_snapshot(peer)

    def _output(self) -> Vector:
        """What x~ becomes if the epoch ends now."""
        state = self.state
        if self.options.variant == "accelerated" and state.applied:
            return (state.total / state.applied).astype(state.x.dtype)
        return state.x

    def _bits(self) -> tuple[int, int, int]:
        total = self.meter.total
        wire = self._wire_before + total.sent_bytes + total.received_bytes
        return self.state.bits_down, self.state.bits_up, wire

    def _record(self, objective: float, bits: tuple[int, int, int]) -> EpochRecord:
        seconds = time.monotonic() - self._started
        return EpochRecord(self.state.epoch, objective, self.state.version, *bits, seconds)

    def _finish(self) -> None:
        self._over = True
        self._transport.close()
        for peer in list(self.peers.values()):
            if peer.waiting:
                self._send_end(peer)

    def _send_end(self, peer: Peer) -> None:
        self._send(
            peer.connection, Message(Kind.END, self.state.epoch, 0, quantiser.raw(self.state.snapshot))
        )
        del self.peers[peer.connection]

    # --- updates -------------------------------------------------------------------------------------------

    def _update(self, peer: Peer, message: Message) -> None:
        quantiser.check(message.coded, self.size)
        if message.epoch != self.state.epoch:
            self.discarded += 1  # of an old epoch: its snapshot is gone
            return
        if peer.ticket != message.version or peer.update is not None:
            raise PayloadError(f"an update with version {message.version}, but it was given {peer.ticket}")
        self.state.bits_up += message.coded.bits
        peer.update = message.coded
        self._apply_ready()

    def _apply_ready(self) -> None:
        """Apply what may be applied, oldest parameters first."""
        while True:
            arrived = [p for p in self.peers.values() if p.update is not None]
            arrived.sort(key=lambda p: p.ticket or 0)
            chosen = next((p for p in arrived if self._may_apply(p)), None)
            if chosen is None:
                return
            self._apply(chosen)

    def _may_apply(self, peer: Peer) -> bool:
        others = sorted(p.ticket for p in self.peers.values() if p is not peer and p.ticket is not None)
        return all(
            self.state.version + 1 + number - ticket <= self.options.max_staleness
            for number, ticket in enumerate(others)
        )

    def _apply(self, peer: Peer) -> None:
        coded, ticket = peer.update, peer.ticket
        if coded is None or ticket is None:
            raise AssertionError("only what has arrived is applied")
        peer.update = peer.ticket = None
        state, options = self.state, self.options
        quantiser.decode(coded, self._scratch)
        if not self._bound.accepts(float(np.linalg.norm(self._scratch))):
            self._reject(peer.index)
            return
        state.staleness[state.version - ticket] += 1
        rate = options.rate(state.epoch)
        grid.proximal_step(state.y, self._scratch, state.full, rate, options.l1, options.l2)
        if options.variant == "accelerated":
            grid.couple(state.x, state.y, state.snapshot, options.theta(state.epoch), state.total)
        state.version += 1
        state.applied += 1
        if self._on_update is not None:
            self._on_update(state.version, state.x)
        if self._trace_every is not None and state.version % self._trace_every == 0:
            self.points.append((self._record(math.nan, self._bits()), self._output().copy()))
        if self._save_every is not None and state.version % self._save_every == 0:
            self._save()

    def _reject(self, index: int) -> None:
        if index not in self.rejected:
            log.warning("shard %d rejects updates of worker %d: their norm is too large", self.shard, index)
        self.rejected[index] = self.rejected.get(index, 0) + 1

    def _answer_all(self) -> None:
        """Give all who wait what there is for them."""
        for peer in sorted(self.peers.values(), key=lambda peer: peer.since):
            if peer.waiting and peer.update is None:
                self._answer(peer)

    def _answer(self, peer: Peer) -> None:
        state = self.state
        if self._over:
            self._send_end(peer)
        elif not state.summed:
            chunk = self._next_chunk(peer) if peer.chunk is None else None
            if chunk is not None:
                peer.chunk, peer.waiting = chunk, False
                self._send(peer.connection, Message(Kind.CHUNK, state.epoch, chunk))
        elif self.shard == 0 and state.applied + self.tickets >= self.options.epoch_length:
            peer.waiting = False
            self._send(peer.connection, Message(Kind.PAUSE, state.epoch))
        elif self.tickets <= self.options.max_staleness:
            self._give(peer)

    def _give(self, peer: Peer) -> None:
        state, options = self.state, self.options
        mu = options.mu * options.theta(state.epoch)
        seed = mix64(options.seed + (self.shard << 40) + (state.version << 8) + self.tickets)
        coded, square = quantiser.parameters(
            state.x, state.snapshot, mode=options.mode, bits=options.bits_down, mu=mu, seed=seed
        )
        if not math.isfinite(square) or math.isnan(coded.scale):
            raise self._diverged()
        state.bits_down += coded.bits
        peer.ticket, peer.waiting = state.version, False
        self._send(peer.connection, Message(Kind.PARAMETERS, state.epoch, state.version, coded))

    def _diverged(self) -> ThinwireError:
        where = f"in epoch {self.state.epoch}" if self.state.epoch else "at the start or in the first epoch"
        return ThinwireError(f"the parameters are not finite {where}: lower lr (now {self.options.lr:g})")

    def _send(self, connection: int, message: Message) -> None:
        if message.version > LARGEST_COUNT:
            raise ThinwireError("more than 2^32 updates: the header has no room for more")
        self._transport.send(connection, message)

    def _save(self) -> None:
        if self._on_save is not None:
            self._on_save(self)
