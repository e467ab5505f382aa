"""GSpar: the unbiased sparsification with the least variance for its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.errors import PayloadError
from thinwire.methods.families import indices as index_code

EVERYTHING = torch.finfo(torch.float32).max
INDEX_BITS = 2**31 - 1


@dataclass(frozen=True)
class GSpar(Exchange):
    """Every rank sends an entry with a probability that grows with its size, and makes up for the rest.

    p_j = min(lambda |g_j|, 1);  Z_j ~ Bernoulli(p_j);  Q(g)_j = Z_j g_j / p_j;  out = (1/W) sum_i Q(g_i)

    By `ratio` (kappa), greedily: p = min(kappa d |g| / ||g||_1, 1), then in each round
    I = {p < 1};  c = (kappa d - d + |I|) / sum_I p;  p = min(c p, 1)
    By `budget` (epsilon), in closed form: the least sum p with E||Q(g)||^2 <= (1 + epsilon) ||g||^2.

    What is sent with p < 1 has the magnitude 1/lambda, whatever it was: it costs an index and a bit of
    sign. Only entries with p = 1 are sent with their values.

    There is no memory: variance, not bias, is the price. Where noise limits the step size, take it
    smaller by 1/(1 + epsilon).

    Args:
        ratio: kappa, the part of the entries that is sent on average. 1 sends everything as it is.
        rounds: of the greedy iteration; two suffice below 5 %.
        budget: epsilon. If given, `ratio` and `rounds` do not count.
        scope: probabilities over each "tensor" by itself, over each "bucket", or over the whole "model".

    Example:
        >>> from thinwire.methods import GSpar
        >>> str(GSpar(ratio=0.05))
        'gspar(ratio=0.05)'

    Reference: Wangni, Wang, Liu and Zhang, "Gradient sparsification for communication-efficient
    distributed optimization", 2018.

    Differences from the paper: index lists are coded as for top-k, in less than log2 d bits an entry.
    """

    name: ClassVar[str] = "gspar"
    ratio: float = 0.1
    rounds: int = 2
    budget: float | None = None
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.at_least(self.name, "rounds", self.rounds, 0)
        if self.budget is not None:
            checks.positive(self.name, "budget", self.budget)
        checks.one_of(self.name, "scope", self.scope, ("tensor", "bucket", "model"))

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, payload="data-dependent", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "gspar", "indices", "scatter", "sign")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        received = await ch.gather(self.encode(x, ch.private_seed()), ragged=True)
        n = x.numel()
        where: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        for parts in received:
            certain, sampled = decode(parts, n)
            # A rank has two lists, and the mean is over lists: every value counts twice.
            where += [certain[0], sampled[0]]
            what += [2 * certain[1], 2 * sampled[1]]
        await ch.commit(all(kernels.all_finite(parts[1]) for parts in received))
        kernels.scatter_mean(where, what, out)

    def lam(self, x: torch.Tensor) -> float:
        """lambda, for which p = min(lambda |x|, 1)."""
        if self.budget is not None:
            return kernels.gspar_budget(x, self.budget)
        return EVERYTHING if self.ratio == 1 else kernels.gspar_probabilities(x, self.ratio, self.rounds)

    def encode(self, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """Indices with p = 1, their values and 1/lambda; the number of the others, their indices, signs."""
        n = x.numel()
        certain, values, signed, magnitude = kernels.gspar_sample(x, self.lam(x), seed)
        shared = torch.tensor([magnitude if signed.numel() else 0.0], dtype=torch.float32, device=x.device)
        return [
            index_code.encode(certain, n),
            torch.cat([values, shared]),
            torch.tensor([signed.numel()], dtype=torch.int32, device=x.device),
            index_code.encode(signed & INDEX_BITS, n),
            kernels.sign_pack(signed.float()),
        ]

    def payload_bytes(self, layout: Layout, size: int) -> None:
        """Chance decides how many entries are sent."""

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, budget=None)


Entries = tuple[torch.Tensor, torch.Tensor]


def decode(parts: Sequence[torch.Tensor], n: int) -> tuple[Entries, Entries]:
    """Indices and values of the certain entries and of the sampled ones, or PayloadError."""
    certain_code, floats, count, sampled_code, signs = parts
    if not floats.numel() or count.numel() != 1:
        raise PayloadError(f"{floats.numel()} values and {count.numel()} counts came with sampled entries")
    certain = index_code.decode(certain_code, n, floats.numel() - 1)
    k = int(count[0])
    sampled = index_code.decode(sampled_code, n, k)
    values = torch.empty(k, dtype=torch.float32, device=floats.device)
    kernels.sign_unpack(signs, float(floats[-1]), k, values)
    return (certain, floats[:-1]), (sampled, values)
