"""N ranks in one process, one operation at a time: a deadlock becomes a failed assertion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from thinwire.core.channel import Program
from thinwire.net import frames
from thinwire.net.executor import cost_of, tally
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo


class Lockstep:
    """Runs the same program on every rank and performs each operation for all of them at once."""

    def __init__(self, size: int) -> None:
        self.rank_infos = [RankInfo(rank, size) for rank in range(size)]
        self.meters = [Meter() for _ in range(size)]

    def run(self, programs: Sequence[Program]) -> bool:
        """Run one program per rank to the end. Returns whether the step was committed."""
        if len(programs) != len(self.rank_infos):
            raise AssertionError(f"{len(self.rank_infos)} ranks, but {len(programs)} programs")
        committed = True
        requests: list[frames.Primitive | None] = [None] * len(programs)
        answers = dict[int, object](dict.fromkeys(range(len(programs))))
        try:
            while True:
                for rank, answer in answers.items():
                    requests[rank] = _send(programs[rank], answer)
                if all(request is None for request in requests):
                    return committed
                answers = self.serve(requests)
                if isinstance(requests[0], frames.Commit):
                    committed = requests[0].finite
        finally:
            for program in programs:
                program.close()

    def serve(self, requests: Sequence[frames.Primitive | None]) -> dict[int, object]:
        """Perform the next operation. Returns the answers by rank; ranks that wait for others have none yet.

        What is asked between hosts comes first: the other ranks of a host wait for its result.
        """
        some = {rank: r for rank, r in enumerate(requests) if isinstance(r, frames.Within)}
        asked = {rank: r for rank, r in some.items() if not r.inside} or some
        if not asked or (asked is some and len(some) < len(requests)):
            self._check_symmetry(requests)
            everybody = range(len(requests))
            given = self.perform(cast("Sequence[frames.Operation | frames.Commit]", requests), everybody)
            return dict(zip(everybody, given, strict=True))
        answers: dict[int, object] = {}
        for ranks in dict.fromkeys(request.ranks for request in asked.values()):
            self._check_symmetry([asked.get(rank) for rank in ranks])
            ops = [asked[rank].op for rank in ranks]
            given = self.perform(ops, ranks, inside=asked[ranks[0]].inside)
            answers |= dict(zip(ranks, given, strict=True))
        return answers

    def perform(
        self, ops: Sequence[frames.Operation | frames.Commit], ranks: Sequence[int], *, inside: bool = False
    ) -> Sequence[object]:
        """One operation of these ranks."""
        seconds = self.spend(ops, ranks, inside=inside)
        for position, (rank, op) in enumerate(zip(ranks, ops, strict=True)):
            if not isinstance(op, frames.Commit) and frames.is_counted(op):
                cost, length = cost_of(op, RankInfo(position, len(ranks)))
                self.meters[rank].count(op.name, tally(op, cost, length, seconds), inside=inside)
        match ops[0]:
            case frames.Commit():
                return [cast(frames.Commit, op).finite for op in ops]
            case frames.AllReduce():
                return _all_reduce([cast(frames.AllReduce, op).tensor for op in ops])
            case frames.AllGather():
                # One copy for all ranks: receivers only read, and a thousand ranks must fit in memory.
                return [torch.stack([cast(frames.AllGather, op).block for op in ops])] * len(ops)
            case frames.Broadcast(src=src):
                blocks = [cast(frames.Broadcast, op).block for op in ops]
                for block in blocks:
                    block.copy_(blocks[src])
                return blocks
            case frames.AllToAll():
                sends = [cast(frames.AllToAll, op).blocks for op in ops]
                return [[sent[rank] for sent in sends] for rank in range(len(ops))]

    def spend(
        self, ops: Sequence[frames.Operation | frames.Commit], ranks: Sequence[int], *, inside: bool
    ) -> float:
        """How long the operation of these ranks takes; lock-step has no clock."""
        del ops, ranks, inside
        return 0.0

    def _check_symmetry(self, requests: Sequence[frames.Primitive | None]) -> None:
        """Every rank must issue the same operation with matching sizes, or a real network would hang."""
        plain = [request.op if isinstance(request, frames.Within) else request for request in requests]
        described = [_describe(op) + _where(request) for op, request in zip(plain, requests, strict=True)]
        if len(set(described)) > 1:
            listing = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(described))
            raise AssertionError(f"deadlock: the ranks issue different operations: {listing}")
        if isinstance(plain[0], frames.AllToAll):
            ops = cast("list[frames.AllToAll]", plain)
            for rank, op in enumerate(ops):
                sent = tuple(other.blocks[rank].numel() for other in ops)
                if op.receive != sent:
                    raise AssertionError(f"deadlock: rank {rank} expects {op.receive} bytes, gets {sent}")


def _send(program: Program, answer: object) -> frames.Primitive | None:
    try:
        return program.send(answer)
    except StopIteration:
        return None


def _all_reduce(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    for tensor in tensors:
        tensor.copy_(total)
    return tensors


def _where(request: frames.Primitive | None) -> str:
    if not isinstance(request, frames.Within):
        return ""
    return " inside a host" if request.inside else " between hosts"


def _describe(request: frames.Operation | frames.Commit | None) -> str:
    match request:
        case None:
            return "finished"
        case frames.AllReduce(tensor=tensor):
            return f"all_reduce of {tensor.numel()} {tensor.dtype}"
        case frames.AllGather(block=block):
            return f"all_gather of {block.numel()} bytes"
        case frames.Broadcast(block=block, src=src):
            return f"broadcast of {block.numel()} bytes from {src}"
        case frames.AllToAll(blocks=blocks):
            return f"all_to_all of {len(blocks)} blocks"
        case frames.Commit(finite=finite):
            return f"commit({finite})"
