"""Majority votes on signs: one bit per entry and, with two shots, one bit back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.quantised import Parts, padded


async def vote(
    bits: torch.Tensor, magnitude: torch.Tensor, ch: Channel, *, two_shot: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The majority as bits, and the magnitudes of all ranks. Ranks with a magnitude of 0 do not vote.

    Votes are counted exactly, so both reductions give the same bits. With two shots every rank counts a
    stretch.
    """
    if not two_shot:
        received = await ch.gather([bits, magnitude])
        told = _magnitudes(received)
        return _majority(received, told, 0, ch), told
    share = -(-bits.numel() // ch.size)
    begins = range(0, share * ch.size, share) if share else [0] * ch.size
    received = await ch.scatter([[bits[begin : begin + share], magnitude] for begin in begins])
    told = _magnitudes(received)
    counted = _majority(received, told, begins[ch.rank], ch)
    everything = await ch.gather([padded(counted, share)])
    return torch.cat([parts[0] for parts in everything])[: bits.numel()], told


async def vote_on_own(pieces: Sequence[Parts], ch: Channel) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for this rank's piece alone: bits and magnitude of the piece for each rank."""
    received = await ch.scatter(pieces)
    told = _magnitudes(received)
    return _majority(received, told, 0, ch), told


def _majority(received: Sequence[Parts], told: torch.Tensor, begin: int, ch: Channel) -> torch.Tensor:
    """The counted votes. The received ones begin at byte `begin` of the tensor's votes."""
    size = received[0][0].numel()
    if told.device.type != "cpu":  # every vote twice, or both ways: no need to know how many ranks vote
        pairs = zip(received, told, strict=True)
        both = [(bits | zero, bits & ~zero) for (bits, _), m in pairs for zero in [_ones_if(m == 0)]]
        votes = [one for pair in both for one in pair]
        return kernels.sign_majority([*votes, _lots(begin, size, ch)], 8 * size)
    magnitudes = cast("list[float]", told.tolist())
    votes = [bits for (bits, _), magnitude in zip(received, magnitudes, strict=True) if magnitude != 0]
    if len(votes) % 2 == 0:
        votes.append(_lots(begin, size, ch))
    return kernels.sign_majority(votes, 8 * size)


def _ones_if(condition: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, 255, 0).to(torch.uint8)


def _lots(begin: int, size: int, ch: Channel) -> torch.Tensor:
    """One more vote, random but the same on all ranks, decides ties."""
    words = -(-(begin + size) // 4)
    rng = ch.shared_rng()
    lots = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, generator=rng).to(ch.device)
    return lots.view(torch.uint8)[begin : begin + size]


def _magnitudes(received: Sequence[Parts]) -> torch.Tensor:
    """Of all ranks: they say who votes and whether the step can be committed."""
    return torch.cat([magnitude for _, magnitude in received])
