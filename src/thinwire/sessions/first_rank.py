"""Replicas start equal: the tensors of the first rank on all ranks, as DistributedDataParallel does it.

What is equal already is not sent: the ranks compare digests first, 16 bytes for each portion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from thinwire.core.channel import Channel, mark_of, together
from thinwire.core.shards import local
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

PORTION_BYTES = 64 * 2**20
DIGEST_BYTES = 16


async def from_first_rank(tensors: Sequence[torch.Tensor], rank_info: RankInfo, link: Link) -> None:
    """Copy the first rank's values into these tensors, some at a time, where a rank has others."""
    portions, mark = _portions(tensors), mark_of("thinwire model")
    if not portions or rank_info.size == 1:
        return
    ch = Channel(rank_info, step=0, seed=0, key="", device=portions[0][0].device, link=link)
    differs: list[bool] = []
    await together([_compare(portions, ch, differs)], rank_info, step=0, mark=mark, link=link)
    for portion in (each for each, other in zip(portions, differs, strict=True) if other):
        ch = Channel(rank_info, step=0, seed=0, key="", device=portion[0].device, link=link)
        await together([_copy(portion, ch)], rank_info, step=0, mark=mark, link=link)


async def _compare(portions: Sequence[Sequence[torch.Tensor]], ch: Channel, differs: list[bool]) -> None:
    """For each portion, whether any rank has other bytes than the first; the same answer on all ranks."""
    mine = b"".join(_digest(portion) for portion in portions)
    block = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(portions[0][0].device)
    theirs = torch.stack([parts[0] for parts in await ch.gather([block])])
    other = (theirs != theirs[0]).view(ch.size, len(portions), DIGEST_BYTES).any(2).any(0)
    differs.extend(bool(each) for each in other)


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    total = xxhash.xxh3_128()
    for tensor in tensors:
        total.update(frames.memory_of(frames.as_bytes(tensor)))
    return total.digest()


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
