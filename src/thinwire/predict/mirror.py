"""One rank that stands for all: every other rank is assumed to send what this one sends.

So a single program shows the operations of a method among a thousand ranks, and how long a rank works between
them, without a thousand programs. If the length of a payload depends on the data, it is the length for this
rank's data.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from thinwire.core.channel import Program
from thinwire.net import frames
from thinwire.net.costs import Cost
from thinwire.net.executor import cost_on_gloo
from thinwire.net.rank_info import RankInfo

# Up to this many bytes gathered blocks get memory of their own, as on a real network: reading a small block
# from the cache again and again would make decoding look cheaper than it is.
OWN_MEMORY = 2**26


@dataclass(frozen=True)
class Round:
    """One network operation, and the seconds that this rank worked before it."""

    operation: str
    work: float
    payload: int
    sent: int
    received: int
    hops: int

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


class ElsewhereError(Exception):
    """A broadcast comes from another rank, whose block this one cannot know: play that rank instead."""

    def __init__(self, src: int) -> None:
        super().__init__(src)
        self.src = src


class Mirror:
    """Runs one rank's program in a group whose other ranks hold the same data."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self._broadcast: torch.Tensor | None = None

    def run(self, program: Program, *, to_the_end: bool = True) -> Job:
        """The rounds of the program; with `to_the_end=False` it stops before its commit."""
        rounds: list[Round] = []
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
                cost, length = cost_on_gloo(request, self.rank_info)
                rounds.append(Round(request.name, work, length, cost.sent, cost.received, cost.hops))
                answer = self._answer(request)
        finally:
            program.close()

    def _answer(self, op: frames.Primitive) -> object:
        size = self.rank_info.size
        match op:
            case frames.AllReduce():
                return op.tensor.mul_(size)
            case frames.AllGather():
                apart = size * op.block.numel() <= OWN_MEMORY
                return op.block.repeat(size, 1) if apart else op.block.expand(size, -1)
            case frames.Broadcast():
                return self._from(op)
            case frames.AllToAll():
                mine = op.blocks[self.rank_info.rank]
                apart = size * mine.numel() <= OWN_MEMORY
                return [mine.clone() if apart else mine for _ in range(size)]
            case frames.Commit():
                return op.finite

    def _from(self, op: frames.Broadcast) -> torch.Tensor:
        """This rank's own block; for the block of another rank, what this rank has broadcast before."""
        if op.src == self.rank_info.rank:
            self._broadcast = op.block.clone()
        elif self._broadcast is None or self._broadcast.shape != op.block.shape:
            raise ElsewhereError(op.src)
        else:
            op.block.copy_(self._broadcast)
        return op.block
