"""The family that codes every entry in a few bits: a codec, an optional memory, gather or two-shot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits
from thinwire.methods.families.memories import DenseMemory, Residual

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Quantised(Exchange):
    """out = (1/W) sum_i decode(encode(g_i)).

    Option of all methods of this family:
        reduce: "gather" brings everybody's code to everybody, which costs (W-1) codes; "twoshot" gives
            every rank a stretch to average and to code once more, which costs about two codes whatever
            W is, and a second rounding; "auto" takes two-shot from five ranks on, where it saves bytes.
    """

    reduce: Literal["auto", "gather", "twoshot"] = field(default="auto", metadata={"main": False})

    def __post_init__(self) -> None:
        checks.one_of(self.name, "reduce", self.reduce, ("auto", "gather", "twoshot"))

    # -- the codec -------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """Parts of lengths that depend on the number of entries only."""

    @abstractmethod
    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        """The mean of what the ranks coded. Raises PayloadError unless all lengths are right."""

    @abstractmethod
    def code_bytes(self, n: int) -> int:
        """Bytes of the parts for n entries."""

    @abstractmethod
    def finite(self, received: Sequence[Parts]) -> bool:
        """Whether all ranks coded finite numbers; a rank with others makes its code say so."""

    def encode_padded(self, v: torch.Tensor, n: int, seed: int) -> list[torch.Tensor]:
        """The code of v with so much behind it that it has the lengths of n entries' code."""
        padded = torch.zeros(n, device=v.device)
        padded[: v.numel()] = v
        return self.encode(padded, seed)

    @property
    def unit(self) -> int:
        """A stretch may begin at multiples of so many entries (whole bytes, whole buckets)."""
        return 8

    @property
    def feedback(self) -> bool:
        """Whether what the code loses is kept and added to the next gradient."""
        return False

    def decode(self, received: Sequence[Parts], n: int) -> torch.Tensor:
        out = torch.empty(n, device=received[0][0].device)
        self.decode_mean(received, out)
        return out

    # -- the exchange ----------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=not self.feedback, conserves=self.feedback)

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        with DenseMemory(state.error, x, out) as memory:
            if self.two_shot(x.numel(), ch.size):
                await self._two_shot(memory, out, ch)
            else:
                await self._gather(memory, out, ch)

    async def _gather(self, memory: DenseMemory, out: torch.Tensor, ch: Channel) -> None:
        mine = self.encode(memory.total, ch.private_seed())
        received = await ch.gather(mine)
        error = memory.close(await ch.commit(self.finite(received)))
        if error is not None:
            self.decode_mean([mine], out)
            error -= out
        self.decode_mean(received, out)

    async def _two_shot(self, memory: DenseMemory, out: torch.Tensor, ch: Channel) -> None:
        n = out.numel()
        cuts = self._cuts(n, ch.size)
        stretches = [slice(a, b) for a, b in pairwise(cuts)]
        coded = [
            self.encode(memory.total[stretch], ch.private_seed() + owner)
            for owner, stretch in enumerate(stretches)
        ]
        received = await ch.scatter(coded)
        own = stretches[ch.rank]
        # What is one's own need not be coded: the stretch holds also what the second code lost before.
        reduced = memory.total[own].float() / ch.size
        others = [parts for rank, parts in enumerate(received) if rank != ch.rank]
        reduced += self.decode(others, reduced.numel()) * ((ch.size - 1) / ch.size)
        # Every code is as long as the longest stretch's, so that lengths are known everywhere.
        longest = max(s.stop - s.start for s in stretches)
        again = self.encode_padded(reduced, longest, ch.private_seed() - 1)
        everything = await ch.gather(again)
        keep = await ch.commit(self.finite(everything))
        error = memory.close(keep)
        if error is not None:
            lost = reduced - self.decode([again], longest)[: reduced.numel()]
            for owner, stretch in enumerate(stretches):
                error[stretch] -= self.decode([coded[owner]], stretch.stop - stretch.start)
            error[own] = lost * ch.size
        for owner, stretch in enumerate(stretches):
            out[stretch] = self.decode([everything[owner]], longest)[: stretch.stop - stretch.start]

    def payload_bytes(self, layout: Layout, size: int) -> int:
        if not self.two_shot(layout.numel, size):
            return self.code_bytes(layout.numel)
        cuts = self._cuts(layout.numel, size)
        widths = [b - a for a, b in pairwise(cuts)]
        return sum(map(self.code_bytes, widths)) + self.code_bytes(max(widths))

    def two_shot(self, n: int, size: int) -> bool:
        """From five ranks on two codes are less than the W-1 of a gather, headers included."""
        if self.reduce != "auto":
            return self.reduce == "twoshot" and size > 1
        return size >= 5 and self.code_bytes(n) > PIECE_BYTES * size

    def _cuts(self, n: int, size: int) -> list[int]:
        """Where the stretches begin and end: equal, and whole units."""
        units = -(-n // self.unit)
        share = -(-units // size) * self.unit
        return [min(n, rank * share) for rank in range(size + 1)]


def lengthened(code: torch.Tensor, size: int) -> torch.Tensor:
    """These bytes with zeros behind them."""
    longer = code.new_zeros(size)
    longer[: code.numel()] = code
    return longer


# Below so many bytes a piece, headers and latency eat what two shots save.
PIECE_BYTES = 256
