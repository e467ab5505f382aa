"""Top-k by the quantile of a fitted normal distribution, without sorting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.methods.families.selectors import GaussianTail, Selector
from thinwire.methods.families.sparse import Sparse, WithRatio


@dataclass(frozen=True)
class GaussianK(Sparse, WithRatio):
    """Sends what lies beyond a threshold found from the mean and the deviation of error + gradient.

    u_i = g_i + e_i;  mu, sigma = mean and deviation of u_i;  t = mu + sigma Phi^-1(1 - ratio/2)
    I = {j: |u_ij| > t}, with t bracketed and bisected until about k are in it;  c_i = u_i on I
    e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        ratio: about the part of the entries that is sent; ranks may send different numbers.
        feedback, values, scope, reduce, warmup: as for all methods that select their own indices.

    Reference: Shi, Chu, Cheung and See, "Understanding top-k sparsification in distributed deep learning",
    2019.

    Differences from the paper: the two-sided tail of the authors' code, not the one-sided of the text; up to
    eight counts, bracketed and then bisected, instead of three blind changes of the threshold; never more
    than 4k/3 entries; unequal numbers of entries are decoded as what they are.
    """

    name: ClassVar[str] = "gaussiank"

    def selector(self, ch: Channel) -> Selector:
        return GaussianTail()

    def density(self) -> float:
        return self.ratio

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return (*super().kernel_families, "gaussian")

    @property
    def varies(self) -> bool:
        return True

    def exact(self) -> Exchange | None:
        return None if self.ratio < 1 else replace(self, values=None)
