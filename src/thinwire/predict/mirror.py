"""One rank that stands for all: every other rank is assumed to send what this one sends.

So a single program shows the operations of a method among a thousand ranks, and how long a rank works between
them, without a thousand programs. If the length of a payload depends on the data, it is the length for this
rank's data. Where ranks have different parts to play (one collects what the others send), a second rank is
played up to that operation, and `Blocks` keeps what it sends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from thinwire.core.channel import Program
from thinwire.net import frames
from thinwire.net.costs import Cost
from thinwire.net.executor import cost_on_gloo
from thinwire.net.frames import Operation
from thinwire.net.rank_info import RankInfo

# Up to this many bytes gathered blocks get memory of their own, as on a real network: reading a small block
# from the cache again and again would make decoding look cheaper than it is.
OWN_MEMORY = 2**26
# Shorter sums, such as those of flags, do not grow with the model.
SMALL_ENTRIES = 256
# Nor do a frame's header and the table of its lengths, or a block that is shorter, such as a flag.
FRAME_BYTES = 24


@dataclass(frozen=True)
class Round:
    """One network operation, and the seconds that this rank worked before it."""

    operation: str
    work: float
    payload: int
    sent: int
    received: int
    hops: int
    inside: bool = False
    """Among the ranks of one host, with `hierarchical`."""

    @property
    def cost(self) -> Cost:
        return Cost(self.sent, self.received, self.hops)


@dataclass(frozen=True)
class Job:
    """What a driver runs in one piece, usually a DDP bucket.

    After the last round it works for `closing` seconds; if it `commits`, it then waits for the rest of the
    step and works for another `finish` seconds.
    """

    rounds: tuple[Round, ...]
    closing: float
    commits: bool
    finish: float

    @property
    def work(self) -> float:
        return sum(each.work for each in self.rounds) + self.closing + self.finish

    def scaled(self, factor: float) -> Job:
        """The same operations with all work `factor` times as long."""
        rounds = tuple(replace(each, work=each.work * factor) for each in self.rounds)
        return replace(self, rounds=rounds, closing=self.closing * factor, finish=self.finish * factor)


def _round(op: Operation, work: float, rank_info: RankInfo, *, inside: bool = False) -> Round:
    cost, length = cost_on_gloo(op, rank_info)
    return Round(op.name, work, length, cost.sent, cost.received, cost.hops, inside)


class Recorded(NamedTuple):
    """An operation without its data, and the ranks that took part in it."""

    op: Operation
    rank_info: RankInfo
    inside: bool


def grown(job: Job, operations: Sequence[Recorded], factor: float, *, work: bool = True) -> Job:
    """The same job, of these operations, for `factor` times as many entries, and with as much `work`."""
    if factor == 1.0:
        return job
    longer = factor if work else 1.0
    rounds = tuple(
        _round(_grown(seen.op, factor), longer * each.work, seen.rank_info, inside=seen.inside)
        for seen, each in zip(operations, job.rounds, strict=True)
    )
    return replace(job, rounds=rounds, closing=longer * job.closing, finish=longer * job.finish)


def _grown(op: Operation, factor: float) -> Operation:
    """The operation without its data, `factor` times as long."""

    def length(count: int) -> int:
        return count if count <= FRAME_BYTES else FRAME_BYTES + round(factor * (count - FRAME_BYTES))

    def block(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(length(tensor.numel()), dtype=tensor.dtype, device="meta")

    match op:
        case frames.AllReduce():
            entries = op.tensor.numel()
            entries = entries if entries < SMALL_ENTRIES else round(factor * entries)
            return replace(op, tensor=torch.empty(entries, dtype=op.tensor.dtype, device="meta"))
        case frames.AllGather() | frames.Broadcast():
            return replace(op, block=block(op.block))
        case frames.AllToAll():
            blocks = {id(each): block(each) for each in op.blocks}  # a gather sends one block to all
            receive = tuple(map(length, op.receive))
            return replace(op, blocks=tuple(blocks[id(each)] for each in op.blocks), receive=receive)


class ElsewhereError(Exception):
    """A broadcast comes from another rank, whose block this one cannot know: play that rank instead."""

    def __init__(self, src: int) -> None:
        super().__init__(src)
        self.src = src


class UnknownBlockError(Exception):
    """In an all-to-all another rank sends what this one does not: play that rank up to there first."""

    def __init__(self, src: int) -> None:
        super().__init__(src)
        self.src = src


Blocks = dict[tuple[int, int], dict[int, tuple[torch.Tensor, ...]]]
"""What ranks have sent in an all-to-all: by program and number of the operation, then by rank."""


class Mirror:
    """Runs one rank's programs in a group whose other ranks hold the same data."""

    def __init__(self, rank_info: RankInfo, sent: Blocks | None = None) -> None:
        self.rank_info = rank_info
        self._sent: Blocks = {} if sent is None else sent
        self._broadcast: torch.Tensor | None = None
        self.operations: dict[int, list[Recorded]] = {}
        """By program: the operations of its last run, without their data."""

    def run(self, program: Program, number: int = 0, *, to_the_end: bool = True) -> Job:
        """The rounds of the program with this number; with `to_the_end=False` it stops before its commit."""
        rounds: list[Round] = []
        self.operations[number] = []
        closing, commits = 0.0, False
        answer: object = None
        try:
            while True:
                began = time.perf_counter()
                try:
                    request = program.send(answer)
                except StopIteration:
                    rest = time.perf_counter() - began
                    return Job(tuple(rounds), closing if commits else rest, commits, rest if commits else 0.0)
                work = time.perf_counter() - began
                if isinstance(request, frames.Commit):
                    if not to_the_end:
                        return Job(tuple(rounds), work, True, 0.0)
                    closing, commits, answer = work, True, request.finite
                    continue
                some = isinstance(request, frames.Within)
                op = request.op if some else request
                ranks = request.ranks if some else range(self.rank_info.size)
                answer = self._answer(op, (number, len(rounds)), ranks)
                inside = some and request.inside
                own = RankInfo(ranks.index(self.rank_info.rank), len(ranks))
                rounds.append(_round(op, work, own, inside=inside))
                self.operations[number].append(Recorded(_grown(op, 1.0), own, inside))
        finally:
            program.close()

    def _answer(self, op: Operation, key: tuple[int, int], ranks: Sequence[int]) -> object:
        """What an operation of these ranks brings to this one."""
        size, me = len(ranks), ranks.index(self.rank_info.rank)
        match op:
            case frames.AllReduce():
                return op.tensor.mul_(size)
            case frames.AllGather():
                apart = size * op.block.numel() <= OWN_MEMORY
                return op.block.repeat(size, 1) if apart else op.block.expand(size, -1)
            case frames.Broadcast():
                return self._from(op, ranks[op.src])
            case frames.AllToAll():
                self._sent.setdefault(key, {})[me] = op.blocks
                apart = sum(op.receive) <= OWN_MEMORY
                blocks = [self._block(op, key, me, src, ranks) for src in range(size)]
                return [block.clone() if apart else block for block in blocks]

    def _block(
        self, op: frames.AllToAll, key: tuple[int, int], me: int, src: int, ranks: Sequence[int]
    ) -> torch.Tensor:
        """What rank `src` sends to this one: what this rank sends to itself, or what another one has sent."""
        length = op.receive[src]
        senders = self._sent[key]
        for rank in (me, *senders):
            if senders[rank][me].numel() == length:
                return senders[rank][me]
        if length == 0:
            return op.blocks[me][:0]
        raise UnknownBlockError(ranks[src])

    def _from(self, op: frames.Broadcast, src: int) -> torch.Tensor:
        """This rank's own block; for the block of another rank, what this rank has broadcast before."""
        if src == self.rank_info.rank:
            self._broadcast = op.block.clone()
        elif self._broadcast is None or self._broadcast.shape != op.block.shape:
            raise ElsewhereError(src)
        else:
            op.block.copy_(self._broadcast)
        return op.block
