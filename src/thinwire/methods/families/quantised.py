"""The family that codes every entry in a few bits: a codec, and two ways to average the codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Traits, checks
from thinwire.errors import PayloadError
from thinwire.methods.families.feedback import Residual

Parts = Sequence[torch.Tensor]
Reduce = Literal["auto", "gather", "twoshot"]
# With fewer bytes per piece, headers and latency cost more than two shots save.
PIECE_BYTES = 256


def reduce_option() -> Any:
    """The last field of every method of this family."""
    return field(default="auto", metadata={"main": False})


class Quantised(Exchange):
    """out = (1/W) sum_i decode(encode(g_i)).

    Args:
        reduce: "gather" sends the code of every rank to every rank, which costs (W-1) codes. "twoshot" gives
            every rank a stretch to average and to code again, which costs about two codes for any W, and a
            second rounding. "auto" takes two shots from five ranks on, if that saves bytes.
    """

    family = "quantised"
    rounds_per_step = "1 (a gather), or 2 with two shots, from five ranks on"
    compute = "one pass to code, one pass to decode each received code"
    feedback: ClassVar[bool] = False
    """Whether the part that the code loses is added to the next gradient."""
    entries_per_byte: ClassVar[int | None] = None
    """If the parts are packed codes and scales of the whole: the number of codes in a byte."""
    reduce: Reduce

    def __post_init__(self) -> None:
        checks.one_of(self.name, "reduce", self.reduce, ("auto", "gather", "twoshot"))

    # -- the codec -------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """Parts, usually codes and then scales. Their lengths depend only on the number of entries."""

    @abstractmethod
    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        """The mean of all decoded codes. Raises PayloadError if a length is wrong."""

    @abstractmethod
    def code_bytes(self, n: int) -> int:
        """The bytes of the parts for n entries."""

    def finite(self, received: Sequence[Parts]) -> bool:
        """Whether all ranks coded finite numbers: a rank that did not sends a non-finite scale."""
        return all(kernels.all_finite(parts[1]) for parts in received)

    def decode(self, received: Sequence[Parts], n: int) -> torch.Tensor:
        out = torch.empty(n, device=received[0][0].device)
        self.decode_mean(received, out)
        return out

    def encode_padded(self, v: torch.Tensor, n: int, seed: int) -> list[torch.Tensor]:
        """The code of v, padded to the length of the code of n entries."""
        if self.entries_per_byte is not None:
            codes, scales = self.encode(v, seed)
            return [padded(codes, -(-n // self.entries_per_byte)), scales]
        return self.encode(padded(v, n), seed)

    @property
    def unit(self) -> int:
        """Stretches begin at multiples of this number of entries (whole bytes, whole buckets)."""
        return 8

    # -- the exchange ----------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=not self.feedback, conserves=self.feedback, scatters=not self.feedback)

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    async def average(self, v: torch.Tensor, ch: Channel) -> GatheredMean | TwoShotMean:
        """The mean of the codes of v of all ranks."""
        if self.two_shot(v.numel(), ch.size):
            return await self._two_shot(v, ch)
        own = self.encode(v, ch.private_seed())
        return GatheredMean(self, own, await ch.gather(own))

    async def _two_shot(self, v: torch.Tensor, ch: Channel) -> TwoShotMean:
        stretches = self._stretches(v.numel(), ch.size)
        coded = [
            self.encode(v[stretch], ch.private_seed() + owner) for owner, stretch in enumerate(stretches)
        ]
        received = await ch.scatter(coded)
        own = stretches[ch.rank]
        # A rank does not code its own share. Its v holds also what its second code lost in the last step.
        reduced = v[own].float() / ch.size
        others = [parts for rank, parts in enumerate(received) if rank != ch.rank]
        reduced += self.decode(others, reduced.numel()) * ((ch.size - 1) / ch.size)
        # Every code has the length of the longest stretch, so all ranks know the lengths.
        longest = max(s.stop - s.start for s in stretches)
        again = self.encode_padded(reduced, longest, ch.private_seed() - 1)
        gathered = await ch.gather(again)
        return TwoShotMean(self, stretches, coded, ch.rank, reduced, longest, gathered)

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> None:
        """The first of two shots. A rank does not code its own piece for itself."""
        received = await self._scattered(pieces, ch)
        if not self.finite(received):
            out.fill_(torch.nan)
            return
        mean = pieces[ch.rank].float() / ch.size
        others = [parts for rank, parts in enumerate(received) if rank != ch.rank]
        if others:
            mean += self.decode(others, mean.numel()) * ((ch.size - 1) / ch.size)
        out.copy_(mean)

    async def _scattered(self, pieces: Sequence[torch.Tensor], ch: Channel) -> list[list[torch.Tensor]]:
        """The codes of this rank's piece by all ranks."""
        return await ch.scatter([self.encode(v, ch.private_seed() + to) for to, v in enumerate(pieces)])

    def payload_bytes(self, layout: Layout, size: int) -> int:
        if not self.two_shot(layout.numel, size):
            return self.code_bytes(layout.numel)
        widths = [s.stop - s.start for s in self._stretches(layout.numel, size)]
        return sum(map(self.code_bytes, widths)) + self.code_bytes(max(widths))

    def two_shot(self, n: int, size: int) -> bool:
        """From five ranks on, two codes are smaller than the W-1 codes of a gather, headers included."""
        if self.reduce != "auto":
            return self.reduce == "twoshot" and size > 1
        return size >= 5 and self.code_bytes(n) > PIECE_BYTES * size

    def _stretches(self, n: int, size: int) -> list[slice]:
        """One stretch per rank, of equal length and in whole units."""
        units = -(-n // self.unit)
        share = -(-units // size) * self.unit
        return [slice(a, b) for a, b in pairwise(min(n, rank * share) for rank in range(size + 1))]


@dataclass(frozen=True)
class GatheredMean:
    """The codes of all ranks, not yet decoded and averaged."""

    codec: Quantised
    own: Parts
    received: Sequence[Parts]

    @property
    def finite(self) -> bool:
        return self.codec.finite(self.received)

    def subtract_own(self, error: torch.Tensor, scratch: torch.Tensor) -> None:
        """error -= the decoded code of this rank."""
        self.codec.decode_mean([self.own], scratch)
        error -= scratch

    def write(self, out: torch.Tensor) -> None:
        self.codec.decode_mean(self.received, out)


@dataclass(frozen=True)
class TwoShotMean:
    """The means of all stretches, coded again by their owners and not yet decoded."""

    codec: Quantised
    stretches: Sequence[slice]
    coded: Sequence[Parts]
    """What this rank sent to each owner."""
    rank: int
    reduced: torch.Tensor
    """The mean of this rank's own stretch, before the second code."""
    longest: int
    gathered: Sequence[Parts]

    @property
    def finite(self) -> bool:
        return self.codec.finite(self.gathered)

    def subtract_own(self, error: torch.Tensor, scratch: torch.Tensor) -> None:
        """error -= the decoded codes of this rank. The owner of a stretch keeps what the second code lost."""
        del scratch
        for owner, stretch in enumerate(self.stretches):
            error[stretch] -= self.codec.decode([self.coded[owner]], stretch.stop - stretch.start)
        lost = self.reduced - self._stretch(self.rank)
        error[self.stretches[self.rank]] = lost * len(self.stretches)

    def write(self, out: torch.Tensor) -> None:
        for owner, stretch in enumerate(self.stretches):
            out[stretch] = self._stretch(owner)

    def _stretch(self, owner: int) -> torch.Tensor:
        width = self.stretches[owner].stop - self.stretches[owner].start
        return self.codec.decode([self.gathered[owner]], self.longest)[:width]


def scales(part: torch.Tensor, count: int) -> list[float]:
    """The numbers of a part from the wire. Raises PayloadError if there are not so many."""
    if part.numel() != count:
        raise PayloadError(f"a code came with {part.numel()} scales; expected {count}")
    return cast("list[float]", part.tolist())


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """x, padded with zeros to this size."""
    longer = x.new_zeros(size)
    longer[: x.numel()] = x
    return longer
