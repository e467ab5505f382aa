"""The plain mean of momenta: what methods that own the momentum do with tensors too small for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, momentum
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits


@dataclass
class HeavyBallState(State):
    m: torch.Tensor = momentum()


@dataclass(frozen=True)
class HeavyBall(Exchange):
    """Averages every rank's momentum instead of its gradient; equals momentum after the mean.

    m_i = a m_i + g_i;  out = (1/W) sum_i m_i        (Nesterov: m_i = a (m_i + g_i); out of m_i + g_i)

    `dgc` and `sketched` use it for biases, norm scales and other small tensors, which would otherwise be
    left without momentum. By itself it is the dense counterpart to compare those with: the optimizer is
    the same, and must have no momentum of its own.

    Args:
        momentum: a, from 0 up and below 1.
        nesterov: look ahead, as `torch.optim.SGD(nesterov=True)` does.
    """

    name = "heavyball"
    formula = "itemsize * n"
    reference = 'Polyak, "Some methods of speeding up the convergence of iteration methods", 1964'
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        checks.momentum(self.name, self.momentum)
        checks.flag(self.name, "nesterov", self.nesterov)

    @property
    def traits(self) -> Traits:
        return Traits(elementwise=True, optimizer="no momentum" if self.momentum else "any")

    def init(self, layout: Layout) -> HeavyBallState:
        return HeavyBallState(torch.zeros(layout.numel, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: HeavyBallState, ch: Channel) -> None:
        m, v = corrected(x, state.m, self.momentum, self.nesterov)  # m = a m + g
        await ch.mean(v.to(x.dtype), out)  # out = (1/W) sum m
        if await ch.commit(bool(out.isfinite().all())):
            state.m.copy_(m)

    def exact(self) -> Exchange:
        return replace(self, momentum=0.0)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return layout.dense_bytes


def corrected(
    g: torch.Tensor, m: torch.Tensor, a: float, nesterov: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next momentum, and what a step adds to the model: the same, unless it looks ahead.

    `m` may be empty where there is no momentum (a = 0): both are then g.
    """
    if not m.numel():
        return g, g
    if nesterov:
        m = (m + g) * a
        return m, m + g
    m = m * a + g
    return m, m


def masked(m: torch.Tensor, new: torch.Tensor, sent: torch.Tensor) -> None:
    """Momentum factor masking: m = new, and 0 at the indices that were sent. `m` may be empty."""
    if m.numel():
        m.copy_(new)
        m[sent.long()] = 0
