"""Private process groups, so that no other collective of the program can interleave with ours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from thinwire.errors import PeerError, ThinwireError
from thinwire.net.liveness import timeout_of
from thinwire.net.store import default_store

_NAME = "thinwire-"


def private_groups(like: dist.ProcessGroup | None, count: int) -> list[dist.ProcessGroup]:
    """`count` new groups with the ranks, backend and timeout of `like` (None: the default group)."""
    if not dist.is_available() or not dist.is_initialized():
        raise ThinwireError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first "
            "(torchrun sets the environment it needs)"
        )
    parent = like if like is not None else cast(dist.ProcessGroup, c10d.GroupMember.WORLD)
    ranks = dist.get_process_group_ranks(parent)
    if dist.get_rank() not in ranks:
        raise ThinwireError(f"rank {dist.get_rank()} is not in the process group of ranks {ranks}")
    return [_private_group(parent, ranks) for _ in range(count)]


def subgroup(parent: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group of some ranks of `parent`, by their numbers there; only they call this."""
    world = dist.get_process_group_ranks(parent)
    return _private_group(parent, [world[rank] for rank in ranks])


def keys_of(group: dist.ProcessGroup) -> list[str]:
    """What the ranks of a private group write to the store: that they are here, and gloo's addresses."""
    name, ranks = group.group_name, dist.get_process_group_ranks(group)
    if not name.startswith(_NAME):
        return []
    return [_here(name, rank) for rank in ranks] + [f"{name}//cpu//0/{place}" for place in range(len(ranks))]


def _here(name: str, rank: int) -> str:
    return f"{name}/here/{rank}"


def _private_group(parent: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Like `new_group(ranks)`, but only these ranks take part, and the name has never been used before.

    `new_group` cannot do both: with local synchronisation it names a group by its ranks and the number of
    groups that this process is in. That number differs between ranks as soon as the program has a smaller
    group, and it repeats after a group was destroyed: the next group then finds the old addresses in the
    store. Either way the ranks wait for each other for ever.
    """
    me, timeout = dist.get_rank(), timeout_of(parent)
    listing = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:12]
    store = default_store()
    number = store.add(f"thinwire/groups/{listing}/{me}", 1)
    name = f"{_NAME}{listing}-{number}"
    _muster(store, name, ranks, me, timeout)
    helpers = cast(Any, c10d)
    try:
        group, _ = helpers._new_process_group_helper(
            len(ranks),
            ranks.index(me),
            ranks,
            helpers.Backend(dist.get_backend(parent)),
            store,
            name,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise PeerError(f"attach failed on rank {me}: no connection to the ranks {ranks}: {error}") from error
    helpers._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def _muster(store: Any, name: str, ranks: list[int], me: int, timeout: timedelta) -> None:
    """Wait until every rank has reached this point; otherwise raise an error that names the missing ranks."""
    keys = {rank: _here(name, rank) for rank in ranks}
    store.set(keys[me], "")
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        missing = ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
        raise PeerError(
            f"attach failed on rank {me}: no word from rank {missing} for {timeout.total_seconds():g} s: "
            "dead, stalled or gone another way. Every rank must attach, and several models in the same order"
        ) from error
