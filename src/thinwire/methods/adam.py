"""1-bit Adam and its kin: Adam's momentum through any exchange, with a second moment that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, Slot, Traits, checks, shared
from thinwire.methods.dense import Dense
from thinwire.methods.efsign import EFSign
from thinwire.methods.families.mean_squares import MeanSquares, WithSquares
from thinwire.methods.families.wrapped import Around
from thinwire.methods.half import BF16


@dataclass
class AdamState(WithSquares):
    m: torch.Tensor = shared()


@dataclass(frozen=True)
class Adam(Around):
    """After some exact steps, the ranks exchange Adam's momentum, and its second moment v changes rarely.

        warm-up:  out = (1/W) sum_i g_i;  m = beta1 m + (1 - beta1) out       v as in Adam
        after it: out = m = exchange of (beta1 m + (1 - beta1) c g_i)         v frozen
        c = sqrt(s_0 / s), of the mean squares of all ranks' gradients in the warm-up, and now

    With v and c constant a step is linear in m, so error feedback works as under SGD. With `efsign` this is
    1-bit Adam. Give `torch.optim.AdamW` to `attach(..., optimizer=...)`: after the warm-up `.grad` holds m,
    also if you clip it, and the session takes the frozen step inside `optimizer.step()`. Entries without a
    gradient in the warm-up do not move until s is renewed and shows one. Small tensors send m in 16 bits.

    Args:
        exchange: the method for the momentum, with error feedback or unbiased.
        warmup: the number of exact steps: at least those in which the learning rate grows.
        refresh: s is renewed after so many times as many steps, in 16 bits; None: never.
        beta1: the first beta of the optimizer.

    Differences from the papers: any exchange, not only signs. 0/1 Adam renews v by single exact gradients.
    """

    name = "adam"
    use_when = (
        "You train with AdamW over a slow link: with signs, 3 % of the bytes, it stays close to `dense`."
    )
    avoid_when = "The run is short: the warm-up sends all bytes of `dense`."
    formula_note = "the bytes of its exchange, after the exact steps; 2 n more where s is renewed"
    rounds_per_step = "1 (a mean) in exact steps, else those of the exchange; 1 more where s is renewed"
    compute = "some passes for m and s, and the exchange's"
    reference = 'Tang et al., "1-bit Adam", 2021; Lu et al., "0/1 Adam", 2022'
    exchange: Exchange = EFSign(bucket=4096)
    warmup: int = 100
    refresh: int | None = 2
    beta1: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "warmup", self.warmup, 1)
        checks.optional(checks.whole, self.name, "refresh", self.refresh, 2)
        checks.momentum(self.name, self.beta1, "beta1")

    @property
    def traits(self) -> Traits:
        inner = self.exchange.traits
        payload = "alternating" if self.refresh and inner.payload == "fixed" else inner.payload
        return Traits(elementwise=inner.elementwise, payload=payload, optimizer="Adam", scope=inner.scope)

    def init(self, layout: Layout) -> AdamState:
        m, squares = torch.zeros(layout.numel, device=layout.device), MeanSquares.new(layout, self.refresh)
        return AdamState(m, squares=squares, inner=self.exchange.init(layout))

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("adam", *super().kernel_families)

    def assign(self, slot: Slot, *, small: bool) -> Exchange:
        return replace(
            self, exchange=self.exchange.assign(slot, small=small) or (BF16() if small else Dense())
        )

    def is_exact(self, step: int) -> bool:
        """Whether v is updated, with the exact mean of this step's gradients."""
        return step < self.warmup

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: AdamState, ch: Channel) -> None:
        m, exact = state.m, self.is_exact(ch.step)
        own = state.grown(x) if exact else state.mixed(m, x, self.beta1, out)  # beta1 m + (1 - beta1) c g
        noted = await state.noted(own, self.warmup, self.refresh, ch)
        if exact:
            await ch.mean(x, out)  # out = (1/W) sum g
            if await ch.commit(state.checked(out, noted).isfinite().all()):
                state.keep(noted, m.lerp_(out.to(m.dtype), 1 - self.beta1))  # m = beta1 m + (1 - beta1) out
        elif await self.pass_on(state.checked(out, noted), out, state, ch):  # out = m = exchange of `mixed`
            state.keep(noted, state.taken(out, m))

    def exact(self) -> Exchange | None:
        inner = self.exchange.exact()
        return inner and replace(self, exchange=inner, beta1=0.0, refresh=None)
