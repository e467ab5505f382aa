"""The plain mean of momenta: what methods that keep the momentum do with tensors too small for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, Link, State, Traits, checks, momentum
from thinwire.methods.families.momentum import corrected


@dataclass
class HeavyBallState(State):
    m: torch.Tensor = momentum()


@dataclass(frozen=True)
class HeavyBall(Exchange):
    """Averages the momentum of every rank instead of its gradient; the same as momentum after the mean.

        m_i = a m_i + g_i;  out = (1/W) sum_i m_i
        Nesterov: m_i = a (m_i + g_i);  out = (1/W) sum_i (m_i + g_i)

    `dgc` and `sketched` use it for biases, norm scales and other small tensors, which would otherwise have
    no momentum.

    Args:
        momentum: a, at least 0 and below 1.
        nesterov: look ahead, as `torch.optim.SGD(nesterov=True)` does.
    """

    name = "heavyball"
    family = "dense"
    use_when = """You compare `dgc` or `sketched` with a dense run: the optimizer is the same, and the
    momentum is kept in the same place."""
    avoid_when = "You want fewer bytes: it sends as much as `dense`. An optimizer with momentum is refused."
    formula = "itemsize * n"
    rounds_per_step = "1 (a mean)"
    compute = "one pass to update the momentum"
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
        if await ch.commit(out.isfinite().all()):
            state.m.copy_(m)

    def exact(self) -> Exchange:
        return replace(self, momentum=0.0)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return layout.dense_bytes
