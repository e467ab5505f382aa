"""Two levels: an exact mean inside every host, an exchange between their leaders, the result to all.

The leaders run the engine's program as if they were the whole group. The sum of a host is divided by the
ranks of a full host, and the result is scaled to the mean over all ranks. So a host with fewer ranks has its
right weight, and what a leader's residual stands for does not depend on the number of hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.core.channel import Channel, Program, ask, together
from thinwire.core.exchange import Exchange, State
from thinwire.core.routing import View
from thinwire.core.schema import is_finite
from thinwire.errors import ConfigError
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.rank_info import Hosts, RankInfo

Execute = Callable[[frames.Primitive], object]
VARIABLE = "LOCAL_WORLD_SIZE"
"""Where torchrun says how many ranks a host has."""


def ranks_per_host(method: str, local: int | None, in_group: int | None = None) -> int:
    """Those of the host's process group or `local`, if one is given, otherwise what the launcher says."""
    if in_group is not None:
        if local not in (None, in_group):
            raise ConfigError(
                f"{method}: local={local}, and inner_group has {in_group} ranks: leave one of them out"
            )
        return in_group
    given = os.environ.get(VARIABLE, "")
    if local is None and (not given.isdecimal() or int(given) < 1):
        what = f"{VARIABLE} is {given!r}" if given else f"{VARIABLE} is not set"
        raise ConfigError(
            f"{method}: {what}, so the number of ranks per host is not known: start with torchrun, or give "
            f"it, {method}(..., local=8)"
        )
    return int(given) if local is None else local


def hosts_of_groups(
    inner_group: dist.ProcessGroup, rank_info: RankInfo, ranks: Sequence[int], execute: Execute
) -> Hosts:
    """The hosts whose ranks are those of given groups; an error on every rank if they do not fit.

    Args:
        inner_group: the group of this rank's host.
        rank_info: this rank in the group of the session.
        ranks: the numbers of that group's ranks in the world.
        execute: an operation on that group.
    """
    # A rank that is not in a group gets another object from torch instead of it.
    is_group = isinstance(cast(object, inner_group), dist.ProcessGroup)
    members = dist.get_process_group_ranks(inner_group) if is_group else []
    # One byte for every rank of the session, and one that says whether the group has others as well.
    mine = [number in members for number in ranks] + [bool(set(members) - set(ranks))]
    block = torch.tensor(mine, dtype=torch.uint8)
    rows = cast("list[list[int]]", cast(torch.Tensor, execute(frames.AllGather(block, 0))).tolist())
    beyond = [rank for rank, row in enumerate(rows) if row[-1]]
    if beyond:
        raise ConfigError(
            f"inner_group of rank {beyond[0]} has ranks that this session does not have: give a group of "
            "ranks that average together"
        )
    groups = [tuple(rank for rank, shares in enumerate(row[:-1]) if shares) for row in rows]
    return Hosts.given(rank_info, groups)


@dataclass(frozen=True)
class _Buffer:
    """The views of one type and device, in one piece of memory."""

    flat: torch.Tensor
    given: torch.Tensor
    """What is averaged first: `flat` itself, or the memory that must not be changed."""
    outs: tuple[torch.Tensor, ...]
    """Where the result is copied to; empty if `flat` is the place."""


async def two_levels(
    views: Sequence[View],
    hosts: Hosts,
    inner: Exchange,
    outer: Callable[[Sequence[View]], Program],
    *,
    step: int,
    mark: int,
    link: Link,
) -> bool:
    """Average the views. Returns whether the result is finite, which is the same on all ranks."""
    buffers, parts = _joined(views)
    ch = Channel(hosts.inside, step=step, seed=0, key="", device=views[0].x.device, link=link)
    means = [inner.run(buffer.given, buffer.flat, State(), ch) for buffer in buffers]
    await within(together(means, hosts.inside, step=step, mark=mark, link=link), hosts.members, inside=True)
    if hosts.leads:
        _scale(buffers, len(hosts.members) / hosts.local)
        await within(outer(parts), hosts.leaders, inside=False)
        _scale(buffers, hosts.local * len(hosts.leaders) / hosts.rank_info.size)
    for buffer in buffers:
        block = frames.as_bytes(buffer.flat)
        if block.numel():
            payload = block.numel() if hosts.leads else 0
            await ask(frames.Within(frames.Broadcast(block, 0, payload), hosts.members, inside=True))
    for buffer in buffers:
        pieces = torch.split(buffer.flat, [out.numel() for out in buffer.outs]) if buffer.outs else ()
        for out, piece in zip(buffer.outs, pieces, strict=True):
            out.copy_(piece)
    return all(is_finite(buffer.flat) for buffer in buffers)


def _joined(views: Sequence[View]) -> tuple[list[_Buffer], list[View]]:
    """The buffers, and the views of them in the given order."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, view in enumerate(views):
        alike.setdefault((view.x.dtype, view.x.device), []).append(number)
    buffers: list[_Buffer] = []
    parts = list(views)
    for numbers in alike.values():
        same = [views[number] for number in numbers]
        if len(same) == 1:
            buffers.append(_Buffer(same[0].out, same[0].x, ()))
        else:
            flat = torch.cat([view.x for view in same])
            buffers.append(_Buffer(flat, flat, tuple(view.out for view in same)))
        pieces = torch.split(buffers[-1].flat, [view.layout.numel for view in same])
        for number, view, piece in zip(numbers, same, pieces, strict=True):
            parts[number] = View(view.layout, piece, piece)
    return buffers, parts


def _scale(buffers: Sequence[_Buffer], factor: float) -> None:
    for buffer in buffers if factor != 1 else ():
        buffer.flat.mul_(factor)


async def within(program: Coroutine[Any, Any, None], ranks: tuple[int, ...], *, inside: bool) -> None:
    """Run a program among these ranks. Its commit is answered here: the step's is asked for later."""
    answer: object = None
    try:
        while True:
            request = program.send(answer)
            if isinstance(request, frames.Commit):
                answer = request.finite
            else:
                answer = await ask(frames.Within(request, ranks, inside))
    except StopIteration:
        return
    finally:
        program.close()
