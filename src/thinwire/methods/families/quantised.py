"""The family that codes every entry in a few bits: a codec, and two ways to average the codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Traits, checks
from thinwire.methods.families.feedback import Residual
from thinwire.net.costs import Link
from thinwire.net.frames import HEADER_BYTES

Parts = Sequence[torch.Tensor]
Flag = bool | torch.Tensor
Reduce = Literal["auto", "gather", "twoshot"]


def reduce_option() -> Any:
    """The last field of every method of this family."""
    return field(default="auto", metadata={"main": False})


class Quantised(Exchange):
    """out = (1/W) sum_i decode(encode(g_i)).

    Args:
        reduce: "gather" sends the code of every rank to every rank, which costs (W-1) codes. "twoshot" gives
            every rank a stretch to average and to code again, which costs about two codes for any W, and a
            second rounding. "auto" takes two shots from five ranks on (`efsign` from three), if that is
            faster on the link.
    """

    family = "quantised"
    rounds_per_step = "1 (a gather), or 2 with two shots, from five ranks on"
    compute = "one pass to code, one pass to decode each received code"
    feedback: ClassVar[bool] = False
    """Whether the part that the code loses is added to the next gradient."""
    two_shots_from: ClassVar[int] = 5
    """With fewer ranks the second rounding costs more than its bytes save."""
    entries_per_byte: ClassVar[int | None] = None
    """If the parts are packed codes and scales of the whole: the number of codes in a byte."""
    reduce: Reduce
    rotate: bool = False
    """Whether codes are those of rotated tensors (`kernels.rotate`). All ranks share the rotation, so that
    the mean of all codes is rotated back once."""

    def __post_init__(self) -> None:
        checks.flag(self.name, "rotate", self.rotate)
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

    def finite(self, received: Sequence[Parts]) -> Flag:
        """Whether all ranks coded finite numbers: a rank that did not sends a non-finite scale.

        Every scale counts, also one that no code has a use for: see `decode`.
        """
        scales = [part for parts in received for part in parts if part.is_floating_point()]
        return kernels.finite_flag(torch.cat(scales))

    def spoil(self, parts: Parts, broken: torch.Tensor) -> None:
        """If `broken`, write into a code that it is of non-finite numbers."""
        parts[1].masked_fill_(broken, torch.nan)

    def decode(self, received: Sequence[Parts], n: int) -> torch.Tensor:
        """The mean of all decoded codes, for further work: NaN everywhere if they are not `finite`."""
        out = torch.empty(n, device=received[0][0].device)
        self.decode_mean(received, out)
        finite = torch.as_tensor(self.finite(received), device=out.device)
        if out.device.type == "cpu":
            return out if finite else out.fill_(torch.nan)
        return torch.where(finite, out, torch.nan)

    def encode_padded(self, v: torch.Tensor, n: int, seed: int, rotation: int) -> list[torch.Tensor]:
        """The code of v, padded to the length of the code of n entries."""
        if self.entries_per_byte is not None and not self.rotate:
            codes, scales = self.encode(v, seed)
            return [padded(codes, -(-n // self.entries_per_byte)), scales]
        return self.encode(self.turned(padded(v, n), rotation), seed)

    def turned(self, v: torch.Tensor, rotation: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """What is coded: R v with `rotate`, in `room` if it can hold float32; else v."""
        if not self.rotate:
            return v
        if room is None or room.dtype != torch.float32:
            room = torch.empty(v.numel(), device=v.device)
        kernels.rotate(v, rotation, room)
        return room

    def turn_back(self, v: torch.Tensor, rotation: int) -> None:
        """v = R^T v with `rotate`."""
        if self.rotate:
            kernels.rotate_back(v, rotation, v)

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

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        """Methods without a residual."""
        mean = await self.average(x, ch, out)
        await ch.commit(mean.finite)
        mean.write(out)

    async def average(
        self, v: torch.Tensor, ch: Channel, room: torch.Tensor | None = None
    ) -> GatheredMean | TwoShotMean:
        """The mean of the codes of v of all ranks. `room`, which may be v, is free until it is written."""
        if self.two_shot(v.numel(), ch.size, ch.link):
            return await self._two_shot(v, ch, room)
        rotation = ch.shared_seed()
        own = self.encode(self.turned(v, rotation, room), ch.private_seed())
        return GatheredMean(self, own, await ch.gather(own), rotation)

    async def _two_shot(self, v: torch.Tensor, ch: Channel, room: torch.Tensor | None) -> TwoShotMean:
        stretches, rotation = self.stretches(v.numel(), ch.size), ch.shared_seed()
        pieces = [
            self.turned(v[stretch], rotation + owner, None if room is None else room[stretch])
            for owner, stretch in enumerate(stretches)
        ]
        coded = [self.encode(piece, ch.private_seed() + owner) for owner, piece in enumerate(pieces)]
        received = await ch.scatter(coded)
        # A rank does not code its own share. Its v holds also what its second code lost in the last step.
        reduced = self._mean_of_own(pieces[ch.rank], received, ch, rotation)
        # Every code has the length of the longest stretch, so all ranks know the lengths.
        longest = max(s.stop - s.start for s in stretches)
        # Signs are unbiased only if the rotation is new to what they code: the means get rotations below.
        again = self.encode_padded(reduced, longest, ch.private_seed() - 1, rotation - 1 - ch.rank)
        gathered = await ch.gather(again)
        return TwoShotMean(self, stretches, coded, ch.rank, reduced, longest, gathered, rotation)

    def _mean_of_own(
        self, own: torch.Tensor, received: Sequence[Parts], ch: Channel, rotation: int
    ) -> torch.Tensor:
        """The mean of this rank's own piece and the codes of it by the others."""
        mean = own.float() / ch.size
        others = [parts for rank, parts in enumerate(received) if rank != ch.rank]
        if others:
            mean += self.decode(others, mean.numel()).mul_((ch.size - 1) / ch.size)
        self.turn_back(mean, rotation + ch.rank)
        return mean

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> Flag:
        """The first of two shots. A rank does not code its own piece for itself."""
        rotation = ch.shared_seed()
        turned = [self.turned(v, rotation + to) for to, v in enumerate(pieces)]
        coded = [self.encode(v, ch.private_seed() + to) for to, v in enumerate(turned)]
        received = await ch.scatter(self.all_or_none(coded))
        out.copy_(self._mean_of_own(turned[ch.rank], received, ch, rotation))
        return self.finite(received)

    def all_or_none(self, coded: Sequence[Parts]) -> Sequence[Parts]:
        """These codes for the ranks. If one has a number that is not finite, all say so."""
        finite = self.finite(coded)
        for parts in coded if finite is not True else ():
            self.spoil(parts, ~torch.as_tensor(finite, device=parts[0].device))
        return coded

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        if not self.two_shot(layout.numel, size, link):
            return self.code_bytes(layout.numel)
        widths = [s.stop - s.start for s in self.stretches(layout.numel, size)]
        return sum(map(self.code_bytes, widths)) + self.code_bytes(max(widths))

    def two_shot(self, n: int, size: int, link: Link) -> bool:
        """From some ranks on, if one more round and two codes take less time than the W-1 codes of a gather.

        All ranks know the inputs and agree.
        """
        if self.reduce != "auto":
            return self.reduce == "twoshot" and size > 1
        code = self.code_bytes(n)
        pieces = 2 * code * (size - 1) / size + (size - 1) * HEADER_BYTES
        faster = link.seconds(size - 1, pieces) + link.operation < link.seconds(0, (size - 1) * code)
        return size >= self.two_shots_from and faster

    def stretches(self, n: int, size: int) -> list[slice]:
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
    rotation: int

    @property
    def finite(self) -> Flag:
        return self.codec.finite(self.received)

    def subtract_own(self, error: torch.Tensor, scratch: torch.Tensor) -> None:
        """error -= the decoded code of this rank."""
        self.codec.decode_mean([self.own], scratch)
        error -= scratch

    def write(self, out: torch.Tensor) -> None:
        narrow = self.codec.rotate and out.dtype != torch.float32
        mean = torch.empty(out.numel(), device=out.device) if narrow else out
        self.codec.decode_mean(self.received, mean)
        self.codec.turn_back(mean, self.rotation)
        if narrow:
            out.copy_(mean)


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
    rotation: int

    @property
    def finite(self) -> Flag:
        return self.codec.finite(self.gathered)

    def subtract_own(self, error: torch.Tensor, scratch: torch.Tensor) -> None:
        """error -= the decoded codes of this rank. The owner of a stretch keeps what the second code lost."""
        room = scratch if scratch.dtype == torch.float32 else torch.empty_like(error)
        for owner, stretch in enumerate(self.stretches):
            if owner != self.rank:
                self.codec.decode_mean([self.coded[owner]], room[stretch])
                error[stretch] -= room[stretch]
        own = self.stretches[self.rank]
        self._decode(self.rank, room[own])
        torch.sub(self.reduced, room[own], out=error[own]).mul_(len(self.stretches))

    def write(self, out: torch.Tensor) -> None:
        for owner, stretch in enumerate(self.stretches):
            self._decode(owner, out[stretch])

    def _decode(self, owner: int, out: torch.Tensor) -> None:
        if out.numel() == self.longest and out.dtype == torch.float32:
            self.codec.decode_mean([self.gathered[owner]], out)
            self.codec.turn_back(out, self.rotation - 1 - owner)
            return
        decoded = self.codec.decode([self.gathered[owner]], self.longest)
        self.codec.turn_back(decoded, self.rotation - 1 - owner)
        out.copy_(decoded[: out.numel()])


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """x, padded with zeros to this size."""
    if x.numel() == size:
        return x
    longer = x.new_zeros(size)
    longer[: x.numel()] = x
    return longer
