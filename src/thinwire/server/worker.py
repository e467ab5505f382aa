"""The worker: sums its chunk at every snapshot, then sends gradient differences."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DisagreementError, PayloadError, PeerError, ThinwireError
from thinwire.kernels.generator import mix64
from thinwire.server import quantiser
from thinwire.server.messages import Kind, Message, MessageConnection, partial, with_text
from thinwire.server.options import Agreement
from thinwire.server.problems import Problem

Vector = NDArray[Any]


class Worker:
    """One worker of a run.

    Args:
        problem: what is minimised; every worker can read all rows.
        agreement: what it has in common with the servers.
        index: its number, from 0; a worker that comes back has its old one.
        life: how often it has been started: rows and rounding are drawn anew.
    """

    def __init__(self, problem: Problem, agreement: Agreement, index: int, life: int = 0) -> None:
        self.problem, self.agreement, self.options, self.index = problem, agreement, agreement.options, index
        self._shards = range(agreement.shards)
        self._parts = [slice(*agreement.part(shard)) for shard in self._shards]
        self.updates = 0
        self._random = np.random.default_rng((self.options.seed, index, life))
        self._seed = mix64(self.options.seed ^ mix64((index << 20) + life + 1))
        self._snapshot = np.zeros(agreement.parameters, problem.start().dtype)
        self._x = np.zeros_like(self._snapshot)
        self._sums: dict[int, tuple[float, Vector]] = {}
        self._epoch = 0
        self._held = [0] * agreement.shards  # the version of what each shard has sent
        self._ended = False
        self._servers: Sequence[MessageConnection] = ()

    async def run(self, servers: Sequence[MessageConnection]) -> Vector:
        """Until the end, with a connection to each shard's server; returns the final parameters."""
        self._servers = servers
        try:
            return await self._run()
        except (ThinwireError, PayloadError):
            raise
        except Exception as error:  # what the user's loss raises: all must learn of it
            self._send_fault(f"{type(error).__name__} in the loss or its gradient: {error}")
            raise

    async def _run(self) -> Vector:
        for server in self._servers:
            server.send(with_text(Kind.HELLO, self.agreement.to_json(), version=self.index))
        while True:
            chunks = await self._take_snapshots()
            for shard in reversed(self._shards):  # the first shard's answer is the one that is waited for
                if chunks[shard] is not None:
                    self._send_sum(shard, chunks[shard] or 0, one_way=shard > 0)
            asked = chunks[0] is not None
            while await self._get_parameters(asked):
                self._send_update()
                asked = True
            if self._ended:
                return self._snapshot.copy()
            for server in self._servers:
                server.send(Message(Kind.FINISHED, self._epoch))

    async def _receive(self, shard: int) -> Message:
        """The next message of a shard's server; its refusal or fault ends this worker."""
        while True:
            message = await self._servers[shard].receive()
            if message.kind == Kind.FAULT:
                raise ThinwireError(f"worker {self.index}: {message.text}")
            if message.kind == Kind.REFUSED:
                raise DisagreementError(f"may not join: {message.text}")
            if message.kind != Kind.WAIT:
                return message

    # --- snapshots -----------------------------------------------------------------------------------------

    async def _take_snapshots(self) -> list[int | None]:
        """x~ of all shards, of one epoch; returns the chunk that each wants to be summed."""
        got = [await self._take_snapshot(shard) for shard in self._shards]
        while True:
            newest = max(epoch for epoch, _ in got)
            behind = [shard for shard in self._shards if got[shard][0] < newest]
            if not behind:
                break
            for shard in behind:  # this shard still waits for an epoch that the others have left
                self._servers[shard].send(Message(Kind.FINISHED, got[shard][0]))
                got[shard] = await self._take_snapshot(shard)
        self._epoch = newest
        self._sums.clear()
        return [chunk for _, chunk in got]

    async def _take_snapshot(self, shard: int) -> tuple[int, int | None]:
        message = await self._receive(shard)
        if message.kind != Kind.SNAPSHOT:
            raise PayloadError(f"shard {shard} sent {message.kind.name} where a snapshot is due")
        if not 0 <= message.version <= self.agreement.chunks:
            raise PayloadError(f"shard {shard} wants chunk {message.version - 1}, which does not exist")
        quantiser.decode(message.coded, self._snapshot[self._parts[shard]])
        return message.epoch, message.version - 1 if message.version else None

    def _send_sum(self, shard: int, chunk: int, *, one_way: bool) -> None:
        if chunk not in self._sums:
            low, high = self.agreement.chunk(chunk)
            loss, gradient = self.problem.total(self._snapshot, low, high)
            # h belongs to the objective, and only workers know all of x~: every row has its part.
            self._sums[chunk] = loss + (high - low) * self.options.penalty(self._snapshot), gradient
        loss, gradient = self._sums[chunk]
        if not np.isfinite(loss) or not bool(np.isfinite(gradient).all()):
            self._fail("the full gradient is not finite: lower lr, or look at the data", shard)
        part = gradient[self._parts[shard]]
        self._servers[shard].send(partial(self._epoch, chunk, loss, part, one_way=one_way))

    # --- updates -------------------------------------------------------------------------------------------

    async def _get_parameters(self, asked: bool) -> bool:
        """Q(x) of every shard, one after the other; False when the epoch pauses or all has ended."""
        for shard in self._shards:
            if not asked or shard > 0:
                self._servers[shard].send(Message(Kind.ASK, self._epoch))
            message = await self._receive(shard)
            while message.kind == Kind.CHUNK:
                if message.epoch != self._epoch or message.version >= self.agreement.chunks:
                    raise PayloadError(
                        f"shard {shard} wants chunk {message.version} of epoch {message.epoch}"
                    )
                self._send_sum(shard, message.version, one_way=False)
                message = await self._receive(shard)
            if message.kind == Kind.PAUSE:
                return False
            if message.kind == Kind.END:
                quantiser.decode(message.coded, self._snapshot[self._parts[shard]])
                self._ended = True
            else:
                self._take_parameters(shard, message)
        return not self._ended

    def _take_parameters(self, shard: int, message: Message) -> None:
        if message.kind != Kind.PARAMETERS or message.epoch != self._epoch:
            raise PayloadError(
                f"shard {shard} sent {message.kind.name} of epoch {message.epoch} in epoch {self._epoch}"
            )
        part, form = self._parts[shard], message.coded.form
        centred = form == quantiser.NOTHING or (self.options.mode == "centered" and form != quantiser.RAW)
        quantiser.decode(message.coded, self._x[part], self._snapshot[part] if centred else None)
        self._held[shard] = message.version

    def _send_update(self) -> None:
        rows = self._random.integers(0, self.problem.rows, self.options.batch)
        alpha = self.problem.difference(self._x, self._snapshot, rows)
        if not bool(np.isfinite(alpha).all()):
            self._fail("a gradient is not finite: lower lr, or look at the data")
        self.updates += 1
        for shard in reversed(self._shards):
            part = alpha[self._parts[shard]]
            seed = mix64(self._seed + (self.updates << 8) + shard)
            if self.options.variant == "sparse":
                coded = quantiser.survivors(part, self.options.keep, seed)
            else:
                coded = quantiser.difference(part, self.options.bits_up, seed)
            update = Message(Kind.UPDATE, self._epoch, self._held[shard], coded, one_way=shard > 0)
            self._servers[shard].send(update)

    def _fail(self, text: str, shard: int = 0) -> NoReturn:
        self._send_fault(text, shard)
        raise ThinwireError(f"worker {self.index}, epoch {self._epoch}: {text}")

    def _send_fault(self, text: str, shard: int = 0) -> None:
        with contextlib.suppress(PeerError):  # the error itself matters more
            self._servers[shard].send(with_text(Kind.FAULT, text, epoch=self._epoch))
