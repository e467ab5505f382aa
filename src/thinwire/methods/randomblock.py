"""Random-block sparsification: one contiguous block, chosen alike on all ranks, one mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.memories import Residual
from thinwire.methods.families.selectors import kept


@dataclass(frozen=True)
class RandomBlock(Exchange):
    """All ranks average the same block of k neighbouring entries, at a place drawn anew each step.

    u_i = g_i + e_i;  s uniform on {0..n-1}, equal on all ranks;  B = {s, ..., s+k-1} mod n
    out[B] = (1/W) sum_i u_i[B];  e_i = u_i with e_i[B] = 0

    No index travels, memory is read in one run, and the collective is an all-reduce. The block wraps
    around the end, so every entry is sent with probability k/n.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n). An entry waits 1/ratio steps on
            average and then comes with all that has piled up, so the learning rate must stay below it.
        feedback: keep what is not sent (the default). Without it the block is scaled by n/k, which makes
            the estimate unbiased, with a variance n/k - 1 times the gradient's square.
        scope: a block in each "tensor", in each "bucket", or one in the whole "model".

    Reference: Eghlidi and Jaggi, "Sparse communication for training deep networks", 2020.

    Differences from the paper: the wrap-around is ours; a block cut off at the end would favour the
    entries in the middle.
    """

    name: ClassVar[str] = "randomblock"
    ratio: float = 0.1
    feedback: bool = True
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.flag(self.name, "feedback", self.feedback)
        checks.one_of(self.name, "scope", self.scope, ("tensor", "bucket", "model"))

    @property
    def traits(self) -> Traits:
        return Traits(
            conserves=self.feedback, unbiased=not self.feedback or self.ratio == 1, scope=self.scope
        )

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback")

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n = x.numel()
        k = kept(self.ratio, n)
        start = ch.shared_seed() % max(n, 1)
        first = min(k, n - start)
        block = torch.cat([x[start : start + first], x[: k - first]]).float()
        if self.feedback:
            block += torch.cat([state.error[start : start + first], state.error[: k - first]])
        # The entry that is not finite may lie outside the block: the block then carries the news.
        if not kernels.all_finite(x):
            block.fill_(torch.nan)
        block = await ch.mean(block, block)
        if await ch.commit(kernels.all_finite(block)) and self.feedback:
            kernels.feedback_block(state.error, x, start, k, clear=out)
        else:
            out.zero_()
        if not self.feedback:
            block *= n / max(k, 1)
        out[start : start + first] = block[:first]
        out[: k - first] = block[first:]

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return kept(self.ratio, layout.numel) * 4
