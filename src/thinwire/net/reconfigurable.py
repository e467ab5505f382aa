"""Performs the primitives on a process group that `torch.distributed` does not know, such as torchft's."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.errors import PeerError, ThinwireError
from thinwire.net import frames
from thinwire.net.executor import ProcessGroupExecutor, cost_of, cost_on_gloo, tally
from thinwire.net.frames import Operation
from thinwire.net.liveness import plain
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo


class ReconfigurableExecutor(ProcessGroupExecutor):
    """Operations in the caller's thread, on a group that somebody else makes, replaces and closes.

    A failed operation is a `PeerError`. Who is missing is not asked: there is no store that outlives the
    group, and the next group consists of those who are there.
    """

    def __init__(self, group: dist.ProcessGroup, meter: Meter) -> None:
        # Not the base's: its group is registered with torch.distributed, and it has a store and a throttle.
        self.group = group
        self.meter = meter
        self.rank_info = RankInfo(group.rank(), group.size())
        self.label = "the new quorum"
        self.pads = False
        self._cost_of = cost_on_gloo if group.name() == "gloo" else cost_of

    def execute(self, op: frames.Primitive) -> object:
        """Carry out one primitive and count it."""
        if isinstance(op, frames.Commit):
            return op.finite
        if isinstance(op, frames.Within):
            raise ThinwireError("replica groups that come and go have no leaders: attach refuses two levels")
        begin = time.perf_counter()
        cost, length = self._cost_of(op, self.rank_info)
        try:
            answer = self._answer(op)
        except RuntimeError as error:  # torch's own errors of a failed or timed-out collective
            cause = plain(str(error)) or type(error).__name__
            raise PeerError(f"{op.name} of {self.label} failed: {cause}") from error
        ended = time.perf_counter()
        self.meter.count(op.name, tally(op, cost, length, ended - begin), ended)
        return answer

    def close(self) -> None:
        """Forget the group: gloo closes its connections with the last reference."""
        del self.group

    def _answer(self, op: Operation) -> object:
        group = cast(Any, self.group)
        match op:
            case frames.AllReduce():
                group.allreduce([op.tensor]).wait()
                return op.tensor
            case frames.AllGather():
                gathered = op.block.new_empty((self.rank_info.size, op.block.numel()))
                group._allgather_base(gathered.view(-1), op.block).wait()
                return gathered
            case frames.Broadcast():
                group.broadcast(op.block, op.src).wait()
                return op.block
            case frames.AllToAll():
                arrived = op.blocks[0].new_empty(sum(op.receive))
                sizes = [block.numel() for block in op.blocks]
                group.alltoall_base(arrived, torch.cat(op.blocks), list(op.receive), sizes).wait()
                return list(torch.split(arrived, list(op.receive)))
