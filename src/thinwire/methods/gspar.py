"""GSpar: the unbiased sparsification with the least variance for its size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, State, Traits, checks
from thinwire.core.traits import Scope
from thinwire.methods.families import sampled

EVERYTHING = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class GSpar(Exchange):
    """Every rank sends an entry with a probability that grows with its size, and scales it up in return.

        p_j = min(lambda |g_j|, 1);  Z_j ~ Bernoulli(p_j);  Q(g)_j = Z_j g_j / p_j
        out = (1/W) sum_i Q(g_i)
        by `ratio` (kappa), greedily: p = min(kappa n |g| / ||g||_1, 1), then in each round
            I = {p < 1};  c = (kappa n - n + |I|) / sum_I p;  p = min(c p, 1)
        by `budget` (epsilon), in closed form: the least sum p with E||Q(g)||^2 <= (1 + epsilon) ||g||^2

    All entries with p < 1 are sent with the magnitude 1/lambda, so each costs an index and a sign bit. Only
    entries with p = 1 are sent with their values. There is no residual: the price is variance, not bias.
    Where noise limits the learning rate, divide it by 1 + epsilon.

    Args:
        ratio: kappa, the share of the entries that is sent on average. 1 sends every entry as it is.
        rounds: the rounds of the greedy iteration. Two suffice below 5 %.
        budget: epsilon. If given, `ratio` and `rounds` have no effect.
        scope: compute the probabilities over each "tensor", each "bucket" or the whole "model".

    Differences from the paper: index lists are coded as for `topk`, in less than log2 n bits per entry.
    """

    name = "gspar"
    family = "sparse"
    use_when = """You want sparse gradients without residuals: the result is unbiased and nothing arrives
    late. It works best if few entries are large."""
    avoid_when = """Noise already limits your learning rate, or there are many workers: it only gathers, so
    the bytes grow with their number. They also depend on the gradient and on chance."""
    formula = "index_bytes(n, sure) + 4 * sure + index_bytes(n, drawn) + ceil(drawn / 8) + 8"
    formula_note = "where sure entries have p = 1 and drawn ones p < 1; together they are about ratio * n"
    rounds_per_step = "2 (the lengths, then a gather)"
    compute = "a few passes for the probabilities, one to draw, one addition per received entry"
    reference = """Wangni, Wang, Liu and Zhang, "Gradient sparsification for communication-efficient
    distributed optimization", 2018"""
    ratio: float = 0.1
    rounds: int = 2
    budget: float | None = None
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.whole(self.name, "rounds", self.rounds, 0)
        checks.optional(checks.positive, self.name, "budget", self.budget)
        checks.scope(self.name, self.scope)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, payload="data-dependent", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "gspar", "indices", "scatter", "sign")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        n = x.numel()
        # p = min(lambda |g|, 1);  Z ~ Bernoulli(p);  Q(g) = Z g / p
        sample = kernels.gspar_sample(x, self.lam(x), ch.private_seed())
        received = await ch.gather(sampled.encode(n, *sample), longest=sampled.longest(n))
        Q = [entries for parts in received for entries in sampled.decode(parts, n)]
        await ch.commit(all(kernels.all_finite(parts[1]) for parts in received))
        # out = (1/W) sum Q. Each rank has two lists, and the mean is over lists, so every value counts twice.
        kernels.scatter_mean([part.indices for part in Q], [2 * part.values for part in Q], out)

    def lam(self, x: torch.Tensor) -> float:
        """lambda, for which p = min(lambda |x|, 1)."""
        if self.budget is not None:
            return kernels.gspar_budget(x, self.budget)
        return EVERYTHING if self.ratio == 1 else kernels.gspar_probabilities(x, self.ratio, self.rounds)

    def payload_bytes(self, layout: Layout, size: int) -> None:
        """Unknown: the number of entries is random."""

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, budget=None)
