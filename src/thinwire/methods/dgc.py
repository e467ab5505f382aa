"""Deep gradient compression: top-k with momentum correction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, Slot, Traits, checks, momentum
from thinwire.errors import ConfigError
from thinwire.methods.families.feedback import Residual, SparseMemory
from thinwire.methods.families.momentum import clipped, corrected, masked
from thinwire.methods.families.sparse import SparseByRatio
from thinwire.methods.heavyball import HeavyBall
from thinwire.methods.topk import TOP_K


@dataclass
class DGCState(Residual):
    """`error` is the paper's v. `m` is empty if there is no momentum."""

    m: torch.Tensor = momentum()


@dataclass(frozen=True)
class DGC(SparseByRatio):
    """Every rank sums up its own momentum and sends the k largest entries of the sum.

        g_i = g_i min(1, sqrt(W) clip / |g_i|)                             local clipping
        m_i = a m_i + g_i;  v_i = v_i + m_i                                momentum correction
        c_i = top_k(v_i);  v_i = v_i - c_i;  m_i = 0 where c_i was sent    momentum factor masking
        out = (1/W) sum_i c_i
        Nesterov: m_i = a (m_i + g_i);  v_i = v_i + m_i + g_i

    The optimizer must have no momentum: plain SGD, or Adam with a first beta of 0. Pass it to
    `attach(..., optimizer=...)`, which checks this. Small tensors are averaged with the same momentum (see
    `heavyball`). Weight decay in the optimizer has no momentum: it is 1 - a times as strong as with
    SGD(momentum=a), so divide it by 1 - a.

    Args:
        momentum: a. With 0 it equals `topk` bit for bit.
        nesterov: look ahead.
        clip: the norm at which the mean gradient would be clipped. The norm covers one tensor, bucket or
            model, by `scope`. The loss scale is taken into account.

    Differences from the paper: exact selection instead of a sampled threshold. The warm-up changes in every
    step instead of every epoch. Clipping is by tensor unless scope="model". Gradients are clipped before
    they are divided by W, hence sqrt(W) instead of 1/sqrt(W).
    """

    name = "dgc"
    use_when = """The link is very slow, you train with momentum SGD, and you can turn off the optimizer's
    momentum. It corrects the momentum of entries that are sent late."""
    avoid_when = """You train with AdamW, whose momentum it replaces. Or the workers see very different data:
    masking forgets momentum, and the result is then biased."""
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
        mean.write(out, ch)  # out = (1/W) sum c

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, values=None, reduce="gather", momentum=0.0, clip=None)
