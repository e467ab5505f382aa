"""GSpar: the unbiased sparsification with the least variance for its size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, HostWaits, Layout, Link, State, Traits, checks
from thinwire.core.traits import Scope
from thinwire.kernels.gspar import LARGEST
from thinwire.methods.families import sampled


@dataclass(frozen=True)
class GSpar(Exchange):
    """Every rank sends an entry with a probability that grows with its size, and scales it up in return.

        p_j = min(lambda |g_j|, 1);  Z_j ~ Bernoulli(p_j);  Q(g)_j = Z_j g_j / p_j
        out = (1/W) sum_i Q(g_i), or with a split reduction out = Q((1/W) sum_i Q(g_i))
        by `ratio` (kappa), greedily: p = min(kappa n |g| / ||g||_1, 1), then in each round
            I = {p < 1};  c = (kappa n - n + |I|) / sum_I p;  p = min(c p, 1)
        by `budget` (epsilon), in closed form: the least sum p with E||Q(g)||^2 <= (1 + epsilon) ||g||^2

    Entries with p < 1 all have the magnitude 1/lambda and cost a position (a Rice code) and a sign bit. Only
    those with p = 1 are sent with their values. There is no residual: the price is variance, not bias.
    The variance is V = (1/W^2) sum_i sum_j g_ij^2 (1/p_ij - 1). A split reduction samples the mean S again,
    which adds E sum_j S_j^2 (1/q_j - 1). W does not divide it; by `budget` it is epsilon (||mean g||^2 + V).

    Args:
        ratio: kappa, the share of the entries that is sent on average. 1 sends every entry as it is.
        rounds: the rounds of the greedy iteration. Two suffice below 5 %.
        budget: epsilon. If given, `ratio` and `rounds` have no effect.
        scope: compute the probabilities over each "tensor", each "bucket" or the whole "model".
        reduce: "gather" sends the entries of every rank to every rank, which costs (W-1) payloads. "split"
            gives every rank a range of coordinates, which averages the entries there and samples again: about
            two payloads for any W. "auto" splits from five ranks on, if that is faster.

    Differences from the paper: no server; the paper's sends the sum of all entries back to the workers.
    """

    name = "gspar"
    family = "sparse"
    use_when = "You want sparse gradients without bias or residuals. It works best if few entries are large."
    avoid_when = "Noise limits your learning rate (or divide it by 1 + epsilon), or bytes must be known."
    formula = "rice_bytes(sure) + 4 * sure + rice_bytes(drawn, signs=1) + head"
    formula_note = "where sure entries have p = 1 and drawn ones p < 1; together they are about ratio * n"
    rounds_per_step = "2 (the lengths, then a gather), or 4 with the split reduction, from five ranks on"
    compute = "a few passes for the probabilities, one to draw, one addition per received entry"
    waits = HostWaits(1, 6, why="lambda, and how many entries are sent")
    reference = """Wangni, Wang, Liu and Zhang, "Gradient sparsification for communication-efficient
    distributed optimization", 2018"""
    ratio: float = 0.1
    rounds: int = 2
    budget: float | None = None
    scope: Scope = "tensor"
    reduce: Literal["auto", "gather", "split"] = "auto"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.whole(self.name, "rounds", self.rounds, 0)
        checks.optional(checks.positive, self.name, "budget", self.budget)
        checks.scope(self.name, self.scope)
        checks.one_of(self.name, "reduce", self.reduce, ("auto", "gather", "split"))

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, payload="data-dependent", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "gspar", "indices", "scatter")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        reduce = sampled.split if self.splits(x.numel(), ch.size, ch.link) else sampled.gather
        mean = await reduce(x, self.sample, ch)
        await ch.commit(mean.finite)
        mean.write(out, ch)

    def sample(self, x: torch.Tensor, seed: int) -> sampled.Sample:
        return sampled.Sample(*kernels.gspar_sample(x, self.lam(x), seed))

    def lam(self, x: torch.Tensor) -> float:
        if self.budget is not None:
            return kernels.gspar_budget(x, self.budget)
        return LARGEST if self.ratio == 1 else kernels.gspar_probabilities(x, self.ratio, self.rounds)

    def splits(self, n: int, size: int, link: Link) -> bool:
        if self.reduce != "auto" or size < 5:
            return self.reduce == "split" and size > 1
        most = self.ratio if self.budget is None else 1 / (1 + self.budget)  # the latter for equal magnitudes
        return sampled.split_pays(n, most, size, link)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> None:
        """Unknown: the number of entries is random."""

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, budget=None)
