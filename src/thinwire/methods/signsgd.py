"""signSGD with majority vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits
from thinwire.methods.families.memories import DenseMemory
from thinwire.methods.families.quantised import Parts, lengthened
from thinwire.methods.families.signs import ScaledSigns, magnitudes


@dataclass(frozen=True)
class _SignOptions(Exchange):
    scale: Literal["rms", "mean"] | None = "rms"


@dataclass(frozen=True)
class SignSGD(ScaledSigns, _SignOptions):
    """Every rank votes for the sign of every entry; the majority decides.

    out = m sign(sum_i sign(g_i)),  m = (1/W) sum_i ||g_i||_2 / sqrt(d), or (1/W) sum_i mean|g_i|, or 1

    One bit an entry on the wire, there and, with two shots, back: votes are counted exactly, so that
    both ways of reducing give the same bits. Biased, and nothing is remembered: it need not converge
    where the ranks' gradients differ much. `efsign` does.

    Whoever has a tensor of zeros does not vote on it (with no vote at all the result is zero). Single
    zeros have no sign and a vote may end in a tie: both are decided by lot, since always + would let
    weights drift that get no gradient.

    Args:
        scale: "rms" (the default) makes the result as long as the ranks' gradients are, so that their
            learning rate does; "mean" takes their mean magnitude, two to three times less where few
            entries are large; None is the paper's, and wants a far smaller learning rate.
        reduce: as for all methods that code every entry.

    Reference: Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2018.

    Differences from the paper: the magnitude; the lot; momentum is the optimizer's, after the vote.
    """

    name: ClassVar[str] = "signsgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.name, "scale", self.scale, ("rms", "mean", None))

    @property
    def traits(self) -> Traits:
        return Traits()

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The votes, and a magnitude that also tells a tensor of zeros (0) and one not finite."""
        if seed % 2:
            bits, magnitude = kernels.sign_pack_mean(v)
        else:  # -v >= 0 where v <= 0: now the zeros are among the others
            bits, magnitude = kernels.sign_pack_mean(-v)
            bits = ~bits
        if 0 < magnitude < torch.inf and self.scale != "mean":
            magnitude = 1.0 if self.scale is None else _rms(v, magnitude)
        return [bits, torch.tensor([magnitude], dtype=torch.float32, device=v.device)]

    async def _gather(self, memory: DenseMemory, out: torch.Tensor, ch: Channel) -> None:
        received = await ch.gather(self.encode(memory.total, ch.private_seed()))
        await ch.commit(self.finite(received))
        votes = _majority(received, 0, ch)
        kernels.sign_unpack(votes, self._magnitude(received), out.numel(), out)

    async def _two_shot(self, memory: DenseMemory, out: torch.Tensor, ch: Channel) -> None:
        bits, magnitude = self.encode(memory.total, ch.private_seed())
        share = -(-bits.numel() // ch.size)
        begins = range(0, share * ch.size, share) if share else [0] * ch.size
        received = await ch.scatter([[bits[begin : begin + share], magnitude] for begin in begins])
        counted = _majority(received, begins[ch.rank], ch)
        everything = await ch.gather([lengthened(counted, share)])
        await ch.commit(self.finite(received))
        votes = torch.cat([parts[0] for parts in everything])[: bits.numel()]
        kernels.sign_unpack(votes, self._magnitude(received), out.numel(), out)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        votes = -(-layout.numel // 8)
        if not self.two_shot(layout.numel, size):
            return votes + 4
        return votes + 4 * size + -(-votes // size)

    def _magnitude(self, received: Sequence[Parts]) -> float:
        told = magnitudes(received)
        return max(told) if self.scale is None else sum(told) / len(told)


def _rms(v: torch.Tensor, mean: float) -> float:
    """The root of the mean square; `mean`, of the magnitudes, serves where squares leave float32's range."""
    norm = cast(torch.Tensor, torch.linalg.vector_norm(v, dtype=torch.float32))
    root = float(norm) / math.sqrt(v.numel())
    return root if 0 < root < torch.inf else mean


def _majority(received: Sequence[Parts], begin: int, ch: Channel) -> torch.Tensor:
    """The counted votes, as bits; those received begin at byte `begin` of the tensor's."""
    votes = [bits for bits, magnitude in received if float(magnitude) != 0]
    size = received[0][0].numel()
    if len(votes) % 2 == 0:  # one more vote, at random but the same on all ranks, decides ties alone
        words = -(-(begin + size) // 4)
        rng = ch.shared_rng()
        lots = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, generator=rng, device=rng.device)
        votes.append(lots.view(torch.uint8)[begin : begin + size])
    return kernels.sign_majority(votes, 8 * size)
