"""Turns a failed operation into an error that names the ranks that are missing, and no others."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from thinwire.errors import PeerError
from thinwire.net.roll_call import Answers, RollCall

_sessions: weakref.WeakValueDictionary[str, RollCall] = weakref.WeakValueDictionary()
# An operation that has waited for almost the timeout failed because somebody did not come.
_TIMED_OUT = 0.9
_WENT_ON = "while the others went on: give all ranks the same number of steps (drop_last=True, for instance)"
_DIED_OR_LEFT = f"It died, or it ended its training {_WENT_ON}"


class Liveness:
    """What an executor says of its operations, and the diagnosis of one that failed."""

    def __init__(self, group: dist.ProcessGroup, session: str, steps: Callable[[], int]) -> None:
        self._rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout_of(group)
        known = _sessions.get(session)  # one for all lanes
        self._owns = known is None
        self._call = _sessions[session] = known or RollCall(session, self._rank, self._ranks, steps)
        self.under_way = self._call.under_way

    def remove_at_end(self, name: str, ranks: int, keys: list[str]) -> None:
        """When the session ends: what these ranks have written to the store under this name."""
        self._call.keys[name] = ranks, keys

    def diagnose(self, operation: str, error: BaseException) -> PeerError:
        """Call all ranks, unless another rank has done so, and say who is missing."""
        answers = self._call.answers()
        if answers is None:
            who = f"the rendezvous store does not answer: its host (usually rank 0) is gone. {_DIED_OR_LEFT}"
        else:
            who = self._who(answers, operation)
        cause = plain(str(error)) or type(error).__name__
        return PeerError(f"{operation} failed on rank {self._ranks[self._rank]}: {who}. Cause: {cause}")

    def _who(self, answers: Answers, operation: str) -> str:
        dead = [rank for rank, answer in answers.items() if answer is None]
        left = [rank for rank, answer in answers.items() if answer is not None and answer.left]
        waiting = {r: a for r, a in answers.items() if a is not None and a.operation is not None}
        idle = [rank for rank in answers if rank not in (*dead, *left, *waiting)]
        waited = max((answer.seconds for answer in waiting.values()), default=0.0)
        timed_out = waited >= _TIMED_OUT * self.timeout.total_seconds()
        also = [f"rank {self._ranks[r]} in {a.operation}" for r, a in waiting.items() if r != self._rank]
        others = f" (also waiting: {', '.join(also)})" if also else ""
        if self._rank in dead or (self._rank in idle and timed_out and not (dead or left)):
            return "every other rank reports this failure: one came later than the timeout, perhaps this one"
        if dead:
            return f"no word from rank {self._named(dead)}: dead, stopped or cut off{others}"
        if left:
            return f"{self._leavers(left, answers)}{others}"
        if idle and timed_out:
            return f"no word from rank {self._named(idle)}: stalled or gone another way{others}"
        if idle or len({answer.operation for answer in waiting.values()}) == 1:
            late = "one came later than the timeout, perhaps this one"
            return f"every rank is alive: a connection broke, or {late}"
        listing = ", ".join(f"rank {self._ranks[r]} in {a.operation}" for r, a in waiting.items())
        return f"every rank is alive, but they stopped in different operations: {listing}"

    def _leavers(self, left: list[int], answers: Answers) -> str:
        by_steps: dict[int, list[int]] = {}
        for rank in left:
            answer = answers[rank]
            by_steps.setdefault(0 if answer is None else answer.steps, []).append(rank)
        early = by_steps.pop(0, [])
        if early and not by_steps:
            return f"rank {self._named(early)} left before its first step: its own output says why"
        ended = [
            f"rank {self._named(ranks)} ended its training after {steps} step{'s' if steps > 1 else ''}"
            for steps, ranks in sorted(by_steps.items())
        ]
        return f"{', '.join(ended)}, {_WENT_ON}, unless its own output has an error"

    def _named(self, ranks: list[int]) -> str:
        return ", ".join(str(self._ranks[rank]) for rank in ranks)

    def close(self) -> None:
        """The session ends on this rank."""
        if self._owns:
            self._call.close()


def is_of_the_network(error: RuntimeError) -> bool:
    """Whether torch's collectives raise such errors. gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def plain(text: str) -> str:
    """The first line of a gloo error message, without the source location and the advice after it."""
    line = text.strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\.(cc|h):\d+\] ", "", line).partition(" This is typically")[0].rstrip(". ")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the group, which the private groups use as well."""
    for name in ("cpu", "cuda"):
        try:
            import torch

            backend = cast(Any, group)._get_backend(torch.device(name))
            return cast(timedelta, backend.options._timeout)
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout
