"""Random-k sparsification: k random coordinates, the same on all ranks or different on each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from thinwire.core import Channel, Layout, Link, Traits, checks
from thinwire.errors import ConfigError
from thinwire.methods.families.feedback import Entries, Residual, SparseMemory
from thinwire.methods.families.sparse import SparseByRatio, SparseMean, check_scale


@dataclass(frozen=True)
class RandomK(SparseByRatio):
    """Every rank sends k entries drawn at random, without replacement.

        u_i = g_i + e_i;  I (or I_i) uniform among the sets of k coordinates;  c_i = u_i on I
        e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        ratio: the share of the entries that is sent: k = max(1, ratio * n). An entry waits 1/ratio steps on
            average and then brings the sum of its gradients, so the learning rate must be smaller.
        shared: all ranks draw the same coordinates. Then no index is sent, and the values are averaged by one
            mean, without `values` and `reduce`.
        feedback: add what is not sent to the next gradient.
        scale: without feedback: "unbiased" scales the values by n/k, which makes the result unbiased, with a
            variance of n/k - 1 times the squared gradient. None sends them as they are: the step is k/n as
            long on average and never longer than the mean gradient, so momentum stays stable.
    """

    name = "randomk"
    family = "shared"
    use_when = """There are many workers and the selection must cost little: one mean of k values, without an
    index. In the reproduction it was more accurate with feedback=False."""
    avoid_when = """The learning rate is tuned for dense training: with feedback, an entry brings the
    gradients of 1/ratio steps at once. For the same number of entries `topk` keeps more of the gradient."""
    formula = "4 * k"
    rounds_per_step = "1 (a mean); with shared=False as for `topk`"
    compute = "drawing k indices, and one pass to update the residual"
    reference = 'Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018'
    ratio: float = 0.1
    shared: bool = True
    scale: Literal["unbiased"] | None = "unbiased"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag(self.name, "shared", self.shared)
        check_scale(self.name, self.scale, self.feedback)
        if self.shared and self.values is not None:
            raise ConfigError(f"{self.name}: values need shared=False; a mean cannot add coded values")

    @property
    def traits(self) -> Traits:
        fixed = self.shared or self.reduce == "gather"
        payload = "fixed" if fixed else "data-dependent"
        unbiased = not self.feedback and self.scale is not None and fixed
        return replace(super().traits, unbiased=unbiased, payload=payload)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, k = x.numel(), self.count(x.numel(), ch.step)
        indices = draw(n, k, ch.shared_rng() if self.shared else ch.private_rng()).to(x.device)  # I
        with SparseMemory(state.error, x, out) as u:  # u = g + e
            c = u.take_at(indices)  # c = u on I
            if not self.feedback and self.scale is not None:
                c.values.mul_(n / max(k, 1))
            if self.shared:
                mean = SparseMean([Entries(indices, await ch.mean(c.values, c.values))])
            else:
                mean = await self.average(c, n, k, ch)
            if await ch.commit(mean.finite):
                u.commit(mean.lost)  # e = u - c
        mean.write(out, ch)  # out = (1/W) sum c

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        if self.shared:
            return 4 * self.count(layout.numel, self.warmup)
        return super().payload_bytes(layout, size, link)


def draw(numel: int, k: int, rng: torch.Generator) -> torch.Tensor:
    """k different numbers below numel, ascending, every set equally likely, without touching all of them."""
    if 4 * k >= numel:
        drawn = torch.randperm(numel, generator=rng)[:k]
        return drawn.sort().values.to(torch.int32)
    # Draw with replacement until k are different; then drop surplus ones at random.
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < k:
        more = torch.randint(numel, (2 * k + 8,), generator=rng)
        found = cast(torch.Tensor, torch.cat([found, more]).unique())
    surplus = torch.randperm(found.numel(), generator=rng)[:k]
    return found[surplus].sort().values.to(torch.int32)
