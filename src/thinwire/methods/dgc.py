"""Deep gradient compression: top-k with momentum correction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, momentum
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.errors import ConfigError
from thinwire.methods.families.feedback import Residual, SparseMemory
from thinwire.methods.families.sparse import SparseByRatio
from thinwire.methods.heavyball import HeavyBall, corrected, masked
from thinwire.methods.topk import TOP_K


@dataclass
class DGCState(Residual):
    """`error` is the paper's v; `m` is empty where there is no momentum."""

    m: torch.Tensor = momentum()


@dataclass(frozen=True)
class DGC(SparseByRatio):
    """Every rank accumulates its own momentum and sends the k largest entries of what has piled up.

    g_i = g_i min(1, sqrt(W) clip / |g_i|)                               local clipping
    m_i = a m_i + g_i;  v_i = v_i + m_i                                  momentum correction
    c_i = top_k(v_i);  v_i = v_i - c_i;  m_i = 0 where c_i was sent      momentum factor masking
    out = (1/W) sum_i c_i                    (Nesterov: m_i = a (m_i + g_i); v_i = v_i + m_i + g_i)

    The momentum happens here, so the optimizer must have none: plain SGD, or Adam with a first beta of 0.
    Give it to `attach(..., optimizer=...)`, which checks that. Small tensors are averaged with the same
    momentum (see `heavyball`). Weight decay belongs into the optimizer, after the mean; it then has no
    momentum, so against SGD(momentum=a) it acts 1 - a times as strong: divide it by 1 - a.

    Masking forgets momentum, so with a > 0 sums are not conserved: where the ranks' gradients do not
    vanish together (very different data), the result is biased.

    Args:
        ratio: the part of the entries that is sent.
        momentum: a; 0 is `topk`, to the last bit.
        nesterov: look ahead.
        clip: the norm above which the mean gradient would be clipped, were it known: each rank's share of
            the mean, g_i / W, is clipped at clip / sqrt(W). The norm is that of what one run sees: a
            tensor, a bucket or the model, by `scope`. The loss scale is taken into account.
        warmup: steps during which the density falls from 25 % to its value, exponentially.
        values, scope, reduce: as for all methods that select their own indices.

    Differences from the paper: the selection is exact instead of by a sampled threshold; the warm-up falls
    at every step instead of every epoch; clipping is by tensor unless scope="model". The paper's gradients
    are divided by W before they are clipped, thinwire's are not, hence sqrt(W) in place of 1/sqrt(W).
    """

    name = "dgc"
    formula = "index_bytes(n, k) + 4 * k"
    reference = 'Lin, Han, Mao, Wang and Dally, "Deep gradient compression", 2018'
    proven_codes = ("qsgd",)
    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.momentum(self.name, self.momentum)
        checks.flag(self.name, "nesterov", self.nesterov)
        checks.optional(checks.positive, self.name, "clip", self.clip)
        if not self.feedback:
            raise ConfigError(f"{self.name}: feedback=False would send momentum and lose the rest; use topk")

    @property
    def traits(self) -> Traits:
        plain, needs = self.momentum == 0, "any" if self.momentum == 0 else "no momentum"
        return replace(super().traits, conserves=plain and self.clip is None, optimizer=needs)

    def init(self, layout: Layout) -> DGCState:
        v, size = super().init(layout).error, layout.numel if self.momentum else 0
        return DGCState(v, torch.zeros(size, device=layout.device))

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        fallback = HeavyBall(self.momentum, self.nesterov) if self.momentum else None
        return fallback if small else self

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: DGCState, ch: Channel) -> None:
        n, k = x.numel(), self.count(x.numel(), ch.step)
        g = x if self.clip is None else clipped(x, math.sqrt(ch.size) * self.clip * ch.context.scale)
        m, step = corrected(g, state.m, self.momentum, self.nesterov)  # m = a m + g
        with SparseMemory(state.error, step, out) as v:  # v = v + m
            c = v.take(TOP_K, k)  # c = top_k(v)
            mean = await self.average(c, n, k, ch)
            if await ch.commit(mean.finite):
                v.commit(mean.lost)  # v = v - c
                masked(state.m, m, c.indices)  # m = 0 where c was sent
        mean.write(out)  # out = (1/W) sum c

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, values=None, reduce="gather", momentum=0.0, clip=None)


def clipped(g: torch.Tensor, norm: float) -> torch.Tensor:
    """g, shrunk to this norm if it is longer; what is not finite stays so."""
    length = float(cast(torch.Tensor, torch.linalg.vector_norm(g, dtype=torch.float64)))
    return g * (norm / length) if length > norm else g
