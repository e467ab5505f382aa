"""EF21 with momentum: the ranks send what has changed since the last step, compressed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, Slot, Traits, checks, hint, momentum, own
from thinwire.errors import ConfigError
from thinwire.methods.families.momentum import corrected
from thinwire.methods.families.wrapped import Around, Wrapping
from thinwire.methods.heavyball import HeavyBall
from thinwire.methods.topk import TopK


@dataclass
class EF21State(Wrapping):
    """v is this rank's momentum, h the sum of all means; ranks is how many keep it (0 at the start)."""

    v: torch.Tensor = momentum()
    h: torch.Tensor = momentum()
    ranks: torch.Tensor = own()
    known: int = hint(0)


@dataclass(frozen=True)
class EF21(Around):
    """Every rank follows its own momentum with compressed changes; all step along the mean of what they know.

        v_i = a v_i + g_i;  c_i = C(v_i - h_i);  h_i = h_i + c_i
        h = h + (1/W) sum_i c_i;  out = h

    What is still missing, v_i - h_i, is the residual of the exchange: h_i is the last v_i without it. So each
    rank gives its exchange the change of v_i, and C is any exchange with error feedback. The momentum
    smooths the noise of small batches, without which EF21 needs large ones.

    Args:
        exchange: the method for the changes; it must keep what it does not send (`topk`, `efsign`, ...).
        momentum: a. With 0 it is plain EF21.

    Differences from the paper: v_i is not multiplied by 1 - a, so the learning rate is that of
    SGD(momentum=a). The optimizer must have no momentum. h begins at 0, not at the first gradient.
    """

    name = "ef21"
    use_when = """The workers see very different data and you train with momentum SGD: what is missing
    vanishes as the training converges, where the residual of plain error feedback stays."""
    avoid_when = """You train with Adam: what arrives late and bundled disturbs its second moment; take
    `adam`."""
    formula_note = "the bytes of its exchange"
    rounds_per_step = "those of its exchange"
    compute = "three passes for the momentum and the change, and those of the exchange"
    reference = """Richtarik, Sokolov and Fatkhullin, "EF21", 2021; Fatkhullin, Tyurin and Richtarik,
    "Momentum provably improves error feedback!", 2023"""
    exchange: Exchange = TopK()
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.momentum(self.name, self.momentum)
        if not self.exchange.traits.conserves:
            raise ConfigError(
                f"{self.name}: {self.exchange} loses what it does not send, and its residual would be "
                "what is still missing; take one with error feedback and no decay, such as topk or efsign"
            )

    @property
    def traits(self) -> Traits:
        inner, needs = self.exchange.traits, "no momentum" if self.momentum else "any"
        return Traits(payload=inner.payload, optimizer=needs, scope=inner.scope)

    def init(self, layout: Layout) -> EF21State:
        v, h = (torch.zeros(layout.numel, device=layout.device) for _ in range(2))
        return EF21State(v, h, torch.zeros(1, device=layout.device), inner=self.exchange.init(layout))

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        inner = self.exchange.assign(slot, small=small)
        if inner is None:
            return HeavyBall(self.momentum) if self.momentum else None
        return replace(self, exchange=inner)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: EF21State, ch: Channel) -> None:
        v, _ = corrected(x, state.v, self.momentum)  # v = a v + g
        h, c, change = state.h, torch.empty_like(v), v - state.v
        if (state.known or int(state.ranks)) not in (0, ch.size):  # of another world size: a part of h
            h = await ch.mean(h)
            change += 0 * h  # what is not finite in it aborts the step
        committed = await self.pass_on(change, c, state, ch)  # c = (1/W) sum C(v_i - h_i)
        h = h + c
        if committed:
            state.v.copy_(v)
            state.h.copy_(h)
            state.ranks.fill_(ch.size)
            state.known = ch.size
        out.copy_(h)

    def exact(self) -> Exchange | None:
        inner = self.exchange.exact()
        return None if inner is None else replace(self, exchange=inner, momentum=0.0)
