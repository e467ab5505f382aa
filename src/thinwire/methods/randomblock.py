"""Random-block sparsification: one contiguous block, chosen alike on all ranks, one mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import checks
from thinwire.channel import Channel
from thinwire.exchange import Exchange, State, Traits, residual
from thinwire.layout import Layout
from thinwire.parts.sparse import kept


@dataclass
class RandomBlockState(State):
    error: torch.Tensor = residual()


@dataclass(frozen=True)
class RandomBlock(Exchange):
    """All ranks average the same block of k neighbouring entries, at a place drawn anew each step.

    u_i = g_i + e_i;  s uniform on {0..n-1}, equal on all ranks;  B = {s, ..., s+k-1} mod n
    out[B] = (1/W) sum_i u_i[B];  e_i = u_i with e_i[B] = 0

    No index travels, memory is read in one run, and the collective is an all-reduce. The block wraps
    around the end, so every entry is sent with probability k/n.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n).
        feedback: keep what is not sent (the default). Without it the block is scaled by n/k, which makes
            the estimate unbiased, with a variance n/k - 1 times the gradient's square.

    Reference: Eghlidi and Jaggi, "Sparse communication for training deep networks", 2020.

    Differences from the paper: the wrap-around is ours; a block cut off at the end would favour the
    entries in the middle.
    """

    name: ClassVar[str] = "randomblock"
    ratio: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.flag(self.name, "feedback", self.feedback)

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback, unbiased=not self.feedback or self.ratio == 1)

    def init(self, layout: Layout) -> RandomBlockState:
        size = layout.numel if self.feedback else 0
        return RandomBlockState(torch.zeros(size, dtype=layout.memory_dtype, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: RandomBlockState, ch: Channel) -> None:
        n = x.numel()
        k = kept(self.ratio, n)
        start = int(torch.randint(max(n, 1), (1,), generator=ch.shared_rng(), device=x.device))
        u = x + state.error if self.feedback else x.to(torch.promote_types(x.dtype, torch.float32))
        first = min(k, n - start)
        block = torch.cat([u[start : start + first], u[: k - first]])
        # The entry that is not finite may lie outside the block: the block then carries the news.
        if not bool(u.isfinite().all()):
            block.fill_(torch.nan)
        block = await ch.mean(block, block)
        if await ch.settled(bool(block.isfinite().all())) and self.feedback:
            u[start : start + first] = 0
            u[: k - first] = 0
            state.error.copy_(u)
        scaled = block if self.feedback else block * (n / max(k, 1))
        out.zero_()
        out[start : start + first] = scaled[:first]
        out[: k - first] = scaled[first:]

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return kept(self.ratio, layout.numel) * layout.memory_dtype.itemsize
