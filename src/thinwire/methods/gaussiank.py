"""Top-k by the quantile of a fitted normal distribution, without sorting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, HostWaits
from thinwire.methods.families.feedback import Residual, Selector, SparseMemory
from thinwire.methods.families.sparse import SparseByRatio

GAUSSIAN_K = Selector(kernels.gaussiank, kernels.select_feedback_gaussiank, kernels.feedback_gaussiank)


@dataclass(frozen=True)
class GaussianK(SparseByRatio):
    """Every rank sends the entries above a threshold that it computes from their mean and deviation.

        u_i = g_i + e_i;  mu, sigma = mean and deviation of u_i;  t = mu + sigma Phi^-1(1 - ratio/2)
        I = {j: |u_ij| > t}, with t bracketed and bisected until I has about k entries;  c_i = u_i on I
        e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        ratio: about the share of the entries that is sent. The ranks may send different numbers of entries.

    Differences from the paper: the two-sided tail of the authors' code, not the one-sided tail of the text.
    Up to eight counts, bracketed and then bisected, instead of three blind changes of the threshold. On a GPU
    the search never waits for the host, where the authors' code waits at every count; a selection waits once.
    Never more than 4k/3 entries. Ranks that send different numbers of entries are decoded correctly.
    """

    name = "gaussiank"
    use_when = """You want the result of `topk` on a device where an exact selection is slow. Its accuracy was
    close to that of `topk` in the reproduction."""
    avoid_when = """You train on CPUs, where the exact `topk` selects faster. Or you need to know the bytes
    beforehand: they depend on the gradient. Under AdamW it ends worse than `dense`, like `topk`."""
    formula = "index_bytes(n, k) + 4 * k"
    formula_note = "where k is about ratio * n and depends on the gradient"
    rounds_per_step = "2 (the lengths, then a gather), or 3 with the split reduction"
    compute = "two passes for mean and deviation, and up to eight passes to count (always eight on a GPU)"
    waits = HostWaits(1, 1, why="the number of entries above the threshold")
    reference = """Shi, Chu, Cheung and See, "Understanding top-k sparsification in distributed deep
    learning", 2019"""
    ragged = True
    proven_codes = ("qsgd", "onebit")
    reads_early = True

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return (*super().kernel_families, "gaussian")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, k = x.numel(), self.count(x.numel(), ch.step)
        with SparseMemory(state.error, x, out) as u:  # u = g + e
            c = u.take(GAUSSIAN_K, k)  # c = u where |u| > t, for about k entries
            mean = await self.average(c, n, k, ch)
            if await ch.commit(mean.finite):
                u.commit(mean.lost)  # e = u - c
        mean.write(await ch.output(out), ch)  # out = (1/W) sum c

    def most(self, n: int, k: int) -> int:
        return min(n, max(k, 4 * k // 3))

    def exact(self) -> Exchange | None:
        return super().exact() if self.ratio == 1 else None
