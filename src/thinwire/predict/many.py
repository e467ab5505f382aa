"""Operations and work among very many workers, extrapolated from fewer.

An operation has a cost that depends on the number of workers as its algorithm says (`net/costs.py`), and a
length that may: a block that every worker gets a part of is a/W + b bytes long, and pieces for all of them
are a + b W bytes altogether. Two numbers of workers determine a and b. Work grows linearly with the workers
where a rank decodes a payload of each. Where it codes and decodes a small piece for each, the time of a piece
is what many small pieces take longer than fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinwire.errors import ThinwireError
from thinwire.net import costs
from thinwire.net.costs import Cost
from thinwire.predict.mirror import Job, Round

# Only the work after these can grow with the number of workers.
GROWING = ("all_gather", "all_to_all")
# Blocks that are shorter may be sent in another way by more workers.
SHORT_BYTES = 2048
# What a rank contributes to a round in which the ranks say how long their payloads are.
LENGTH_BYTES = 8

Jobs = tuple[Job, ...]
Steps = tuple[Jobs, ...]
Counted = Sequence[tuple[int, Job]]
"""Jobs, each with its number of workers."""


def only_gathers(few: Job, many: Job) -> bool:
    """Whether so many workers and any larger number take the same operations: sums, and whole payloads."""
    return kinds(few) == kinds(many) and gathers_whole(many)


def gathers_whole(job: Job) -> bool:
    """Whether its operations are sums and gathers of whole payloads, without pieces for every worker."""
    following = (*job.rounds[1:], None)
    return all(
        each.operation in ("all_reduce", "broadcast") or each.inside or _whole(each) or _lengths(each, after)
        for each, after in zip(job.rounds, following, strict=True)
    )


def _whole(each: Round) -> bool:
    return each.operation == "all_gather" and each.payload >= SHORT_BYTES


def _lengths(each: Round, after: Round | None) -> bool:
    """Whether the ranks say in this round how long the payloads are that they gather in the next one."""
    short = each.operation == "all_gather" and each.payload == LENGTH_BYTES
    return short and after is not None and not after.inside and _whole(after)


def job_for(workers: int, measured: Counted, played: Counted | None, local: int = 1) -> Job:
    """One job of so many workers.

    Args:
        workers: the number.
        measured: for two numbers of workers, the job with its measured work; with `played` the larger one
            is enough.
        played: for two larger numbers, the last of which may be `workers`: the job with the work of a part of
            the model. None if the operations do not change, see `only_gathers`.
        local: the ranks per host; operations inside a host do not depend on the workers.
    """
    (few, slow), (many, slower) = measured[0], measured[-1]
    (fewer, one), (more, other) = measured if played is None else played
    if kinds(one) != kinds(other):
        raise ThinwireError(
            f"no prediction for {workers:,} workers: the operations of {fewer:,} and of {more:,} differ"
        )
    hosts = [-(-count // local) for count in (fewer, more, workers)]
    rounds = tuple(_round(a, b, *hosts) for a, b in zip(one.rounds, other.rounds, strict=True))
    if played is None:
        return _with_payloads(slow, slower, rounds, (workers - many) / (many - few))
    piece = max(0.0, other.work - one.work) / (more - fewer)
    return _with_pieces(slower, rounds, piece * (workers - many))


def kinds(job: Job) -> list[tuple[str, bool]]:
    return [(each.operation, each.inside) for each in job.rounds]


def _with_pieces(measured: Job, rounds: tuple[Round, ...], longer: float) -> Job:
    """The measured work, and so much more for the pieces; in other rounds, all of it before the last one."""
    if kinds(measured) == [(each.operation, each.inside) for each in rounds]:
        timed = (replace(each, work=old.work) for each, old in zip(rounds, measured.rounds, strict=True))
        return replace(measured, rounds=tuple(timed), closing=measured.closing + longer)
    *most, last = (replace(each, work=0.0) for each in rounds)
    return Job((*most, replace(last, work=measured.work)), longer, measured.commits, 0.0)


def _with_payloads(few: Job, many: Job, rounds: tuple[Round, ...], reach: float) -> Job:
    """Work grows linearly with the number of workers, because a rank decodes the payloads of all of them."""

    def on(a: float, b: float, grows: bool) -> float:
        return b + max(0.0, b - a) * reach if grows else min(a, b)

    timed: list[Round] = []
    grows = False
    for x, y, z in zip(few.rounds, many.rounds, rounds, strict=True):
        timed.append(replace(z, work=on(x.work, y.work, grows)))
        grows = z.operation in GROWING and not z.inside
    closing, finish = on(few.closing, many.closing, grows), on(few.finish, many.finish, grows)
    return Job(tuple(timed), closing, many.commits, finish)


def _round(a: Round, b: Round, fewer: int, more: int, workers: int) -> Round:
    """The operation that is `a` among `fewer` and `b` among `more`, among `workers`."""
    if b.inside:
        return b

    def shrinking(x: float, y: float) -> int:
        """x and y are p + q/W."""
        q = (x - y) / (1 / fewer - 1 / more)
        return max(0, round(y + q * (1 / workers - 1 / more)))

    def growing(x: float, y: float) -> int:
        """x and y are p + q W."""
        return max(0, round(y + (y - x) * (workers - more) / (more - fewer)))

    def to_others(x: int, y: int) -> int:
        """The same without the piece of a rank for itself, which is not sent."""
        everything = growing(x * fewer / max(1, fewer - 1), y * more / (more - 1))
        return round(everything * (workers - 1) / workers)

    match b.operation:
        case "all_reduce":
            length = shrinking(a.payload, b.payload)
            cost, messages = (
                costs.all_reduce(workers, length),
                costs.gloo_all_reduce_messages(workers, length),
            )
            cost = costs.with_gloo_control(cost, messages, messages)
        case "all_gather":
            length = shrinking(a.payload, b.payload)
            messages = costs.gloo_all_gather_messages(workers)
            cost = costs.with_gloo_control(costs.all_gather(workers, length), messages, messages)
        case "broadcast":
            length = max(a.payload, b.payload)
            block = max(each.received or each.payload for each in (a, b))
            children = costs.tree_children(0, workers)
            cost = costs.with_gloo_control(
                Cost(children * block, 0 if length else block, costs.tree_depth(workers)), children, 1
            )
        case _:
            length = growing(a.payload, b.payload)
            cost = Cost(to_others(a.sent, b.sent), to_others(a.received, b.received), workers - 1)
    return Round(b.operation, b.work, length, cost.sent, cost.received, cost.hops)
