"""Private process groups: no other collective of the program can come between ours."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from thinwire.errors import ThinwireError
from thinwire.liveness import timeout_of


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
    backend = dist.get_backend(parent)
    made: list[dist.ProcessGroup] = []
    for _ in range(count):
        # Local synchronisation: ranks outside the group need not take part.
        group = dist.new_group(
            ranks, timeout=timeout_of(parent), backend=backend, use_local_synchronization=True
        )
        made.append(cast(dist.ProcessGroup, group))
    return made
