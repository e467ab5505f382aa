"""Replicas start equal: the tensors of the first rank on all ranks, as DistributedDataParallel does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.channel import Channel, mark_of, together
from thinwire.core.shards import local
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

PORTION_BYTES = 64 * 2**20


async def from_first_rank(tensors: Sequence[torch.Tensor], rank_info: RankInfo, link: Link) -> None:
    """Copy the first rank's values into these tensors, some at a time."""
    for portion in _portions(tensors):
        ch = Channel(rank_info, step=0, seed=0, key="", device=portion[0].device)
        task, mark = _copy(portion, ch), mark_of("thinwire model")
        await together([task], rank_info, step=0, mark=mark, link=link)


def _portions(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of tensors on one device, of about one portion each; empty tensors are omitted."""
    portions: list[list[torch.Tensor]] = []
    room = 0
    for tensor in map(local, tensors):
        size = tensor.numel() * tensor.element_size()
        if not size:
            continue
        if room < size or portions[-1][0].device != tensor.device:
            portions.append([])
            room = PORTION_BYTES
        portions[-1].append(tensor.detach())
        room -= size
    return portions


async def _copy(tensors: Sequence[torch.Tensor], ch: Channel) -> None:
    for tensor, values in zip(tensors, await ch.broadcast(tensors, 0), strict=True):
        tensor.copy_(values.view(tensor.shape))
