"""The worker's coroutine: sums its chunk at every snapshot, then sends gradient differences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import PayloadError, ThinwireError
from thinwire.kernels.generator import mix64
from thinwire.server import quantiser
from thinwire.server.agreement import Agreement
from thinwire.server.mail import WorkerMail, receive
from thinwire.server.messages import Kind, Message, partial, with_text
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
        self.parts = [agreement.part(shard) for shard in range(agreement.shards)]
        self.updates = 0
        self._random = np.random.default_rng((self.options.seed, index, life))
        self._seed = mix64(self.options.seed ^ mix64((index << 20) + life + 1))
        begin = problem.start()
        self._snapshot = np.zeros(agreement.parameters, begin.dtype)
        self._x = np.zeros_like(self._snapshot)
        self._sums: dict[int, tuple[float, Vector]] = {}
        self._epoch = -1
        self._held = [0] * agreement.shards  # the version of what each shard has sent
        self._ended = False

    async def run(self, mail: WorkerMail) -> Vector:
        """Until the end; returns the final parameters."""
        try:
            return await self._run(mail)
        except (ThinwireError, PayloadError):
            raise
        except Exception as error:  # what the user's loss raises: all must learn of it
            text = f"{type(error).__name__} in the loss or its gradient: {error}"
            mail.send(0, with_text(Kind.FAULT, text, epoch=max(self._epoch, 0)))
            raise

    async def _run(self, mail: WorkerMail) -> Vector:
        shards = range(self.agreement.shards)
        for shard in shards:
            mail.send(shard, with_text(Kind.HELLO, self.agreement.to_json(), version=self.index))
        while True:
            chunks = await self._take_snapshots(mail)
            for shard in reversed(shards):  # the first shard's answer is the one that is waited for
                if chunks[shard] is not None:
                    self._send_sum(mail, shard, chunks[shard] or 0, one_way=shard > 0)
            asked = chunks[0] is not None
            while await self._get_parameters(mail, asked):
                self._send_update(mail)
                asked = True
            if self._ended:
                return self._snapshot.copy()
            for shard in shards:
                mail.send(shard, Message(Kind.FINISHED, self._epoch))

    # --- snapshots -----------------------------------------------------------------------------------------

    async def _take_snapshots(self, mail: WorkerMail) -> list[int | None]:
        """x~ of all shards, of one epoch; returns the chunk that each wants to be summed."""
        shards = range(self.agreement.shards)
        got = [await self._take_snapshot(shard) for shard in shards]
        while True:
            newest = max(epoch for epoch, _ in got)
            behind = [shard for shard in shards if got[shard][0] < newest]
            if not behind:
                break
            for shard in behind:  # this shard still waits for an epoch that the others have left
                mail.send(shard, Message(Kind.FINISHED, got[shard][0]))
                got[shard] = await self._take_snapshot(shard)
        self._epoch = newest
        self._sums.clear()
        return [chunk for _, chunk in got]

    async def _take_snapshot(self, shard: int) -> tuple[int, int | None]:
        message = await receive(shard)
        if message.kind != Kind.SNAPSHOT:
            raise PayloadError(f"shard {shard} sent {message.kind.name} where a snapshot is due")
        if not 0 <= message.version <= self.agreement.chunks:
            raise PayloadError(f"shard {shard} wants chunk {message.version - 1}, which does not exist")
        begin, end = self.parts[shard]
        quantiser.decode(message.coded, self._snapshot[begin:end])
        return message.epoch, message.version - 1 if message.version else None

    def _send_sum(self, mail: WorkerMail, shard: int, chunk: int, *, one_way: bool) -> None:
        if chunk not in self._sums:
            low, high = self.agreement.chunk(chunk)
            loss, gradient = self.problem.total(self._snapshot, low, high)
            # h belongs to the objective, and only workers know all of x~: every row has its part.
            self._sums[chunk] = loss + (high - low) * self.options.penalty(self._snapshot), gradient
        loss, gradient = self._sums[chunk]
        if not np.isfinite(loss) or not bool(np.isfinite(gradient).all()):
            self._fail(mail, shard, "the full gradient is not finite: lower lr, or look at the data")
        begin, end = self.parts[shard]
        mail.send(shard, partial(self._epoch, chunk, loss, gradient[begin:end], one_way=one_way))

    # --- updates -------------------------------------------------------------------------------------------

    async def _get_parameters(self, mail: WorkerMail, asked: bool) -> bool:
        """Q(x) of every shard, one after the other; False when the epoch pauses or all has ended."""
        for shard in range(self.agreement.shards):
            if not asked or shard > 0:
                mail.send(shard, Message(Kind.ASK, self._epoch))
            message = await receive(shard)
            while message.kind == Kind.CHUNK:
                if message.epoch != self._epoch or message.version >= self.agreement.chunks:
                    raise PayloadError(
                        f"shard {shard} wants chunk {message.version} of epoch {message.epoch}"
                    )
                self._send_sum(mail, shard, message.version, one_way=False)
                message = await receive(shard)
            if message.kind == Kind.PAUSE:
                return False
            begin, end = self.parts[shard]
            if message.kind == Kind.END:
                quantiser.decode(message.coded, self._snapshot[begin:end])
                self._ended = True
                continue
            self._take_parameters(shard, message)
        return not self._ended

    def _take_parameters(self, shard: int, message: Message) -> None:
        if message.kind != Kind.PARAMETERS or message.epoch != self._epoch:
            raise PayloadError(
                f"shard {shard} sent {message.kind.name} of epoch {message.epoch} in epoch {self._epoch}"
            )
        begin, end = self.parts[shard]
        form = message.coded.form
        centred = form == quantiser.NOTHING or (self.options.mode == "centered" and form != quantiser.RAW)
        quantiser.decode(message.coded, self._x[begin:end], self._snapshot[begin:end] if centred else None)
        self._held[shard] = message.version

    def _send_update(self, mail: WorkerMail) -> None:
        rows = self._random.integers(0, self.problem.rows, self.options.batch)
        alpha = self.problem.difference(self._x, self._snapshot, rows)
        if not bool(np.isfinite(alpha).all()):
            self._fail(mail, 0, "a gradient is not finite: lower lr, or look at the data")
        self.updates += 1
        for shard in reversed(range(self.agreement.shards)):
            begin, end = self.parts[shard]
            seed = mix64(self._seed + (self.updates << 8) + shard)
            if self.options.variant == "sparse":
                coded = quantiser.survivors(alpha[begin:end], self.options.keep, seed)
            else:
                coded = quantiser.difference(alpha[begin:end], self.options.bits_up, seed)
            update = Message(Kind.UPDATE, self._epoch, self._held[shard], coded, one_way=shard > 0)
            mail.send(shard, update)

    def _fail(self, mail: WorkerMail, shard: int, text: str) -> None:
        mail.send(shard, with_text(Kind.FAULT, text, epoch=self._epoch))
        raise ThinwireError(f"worker {self.index}, epoch {self._epoch}: {text}")
