"""Majority votes on signs: one bit per entry and, with two shots, one bit back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.quantised import Parts, padded


async def vote(
    bits: torch.Tensor, magnitude: torch.Tensor, ch: Channel, *, two_shot: bool
) -> tuple[torch.Tensor, list[float]]:
    """The majority as bits, and the magnitudes of all ranks. Ranks with a magnitude of 0 do not vote.

    Votes are counted exactly, so both reductions give the same bits. With two shots every rank counts a
    stretch.
    """
    if not two_shot:
        received = await ch.gather([bits, magnitude])
        return _majority(received, 0, ch), _magnitudes(received)
    share = -(-bits.numel() // ch.size)
    begins = range(0, share * ch.size, share) if share else [0] * ch.size
    received = await ch.scatter([[bits[begin : begin + share], magnitude] for begin in begins])
    counted = _majority(received, begins[ch.rank], ch)
    everything = await ch.gather([padded(counted, share)])
    return torch.cat([parts[0] for parts in everything])[: bits.numel()], _magnitudes(received)


async def vote_on_own(pieces: Sequence[Parts], ch: Channel) -> tuple[torch.Tensor, list[float]]:
    """The same for this rank's piece alone: bits and magnitude of the piece for each rank."""
    received = await ch.scatter(pieces)
    return _majority(received, 0, ch), _magnitudes(received)


def _majority(received: Sequence[Parts], begin: int, ch: Channel) -> torch.Tensor:
    """The counted votes. The received ones begin at byte `begin` of the tensor's votes."""
    votes = [bits for bits, magnitude in received if float(magnitude) != 0]
    size = received[0][0].numel()
    if len(votes) % 2 == 0:  # one more vote, random but the same on all ranks, decides ties
        words = -(-(begin + size) // 4)
        rng = ch.shared_rng()
        lots = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, generator=rng, device=rng.device)
        votes.append(lots.view(torch.uint8)[begin : begin + size])
    return kernels.sign_majority(votes, 8 * size)


def _magnitudes(received: Sequence[Parts]) -> list[float]:
    return [float(magnitude) for _, magnitude in received]
