"""1-bit Adam and its kin: Adam's momentum through any exchange, with the second moment frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, Slot, Traits, checks, momentum
from thinwire.methods.dense import Dense
from thinwire.methods.efsign import EFSign
from thinwire.methods.families.wrapped import Around, Wrapping
from thinwire.methods.half import BF16


@dataclass
class AdamState(Wrapping):
    m: torch.Tensor = momentum()


@dataclass(frozen=True)
class Adam(Around):
    """After some exact steps, the ranks exchange Adam's momentum, and its second moment v stays as it is.

        warm-up:  out = (1/W) sum_i g_i;  m = beta1 m + (1 - beta1) out       v as in Adam
        after it: out = m = exchange of (beta1 m + (1 - beta1) g_i)           v frozen
        theta = theta - gamma (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^s)) + eps),  s updates of v

    With v frozen a step is linear in m, so error feedback works as under SGD. With `efsign` this is 1-bit
    Adam. Give `torch.optim.AdamW` to `attach(..., optimizer=...)`: after the warm-up `.grad` holds m, also
    when you clip it, and the session takes the frozen step inside `optimizer.step()`. Entries without a
    gradient in the warm-up (v = 0) do not move until v is refreshed. Small tensors send m in 16 bits.

    Args:
        exchange: the method for the momentum, with error feedback or unbiased.
        warmup: the number of exact steps: at least those in which the learning rate grows.
        refresh: so many exact steps, one in 2, update v after the warm-up; then so many, one in 4; ...
        beta1: the first beta of the optimizer.

    Differences from the papers: any exchange, not only signs. v keeps its own bias correction. 0/1 Adam also
    leaves out sync rounds.
    """

    name = "adam"
    use_when = """You train with AdamW over a slow link: with signs (3 % of the bytes) it stays close to
    `dense`, where sparse and sign methods on gradients do not."""
    avoid_when = "The run is short: the warm-up sends all bytes of `dense`. Or gradients still grow after it."
    formula_note = "the bytes of its exchange, after the exact steps"
    rounds_per_step = "1 (a mean) in exact steps, otherwise those of the exchange"
    compute = "two passes for m, and the exchange's"
    reference = 'Tang et al., "1-bit Adam", 2021; `refresh`: Lu et al., "0/1 Adam", 2022'
    exchange: Exchange = EFSign(bucket=4096)
    warmup: int = 100
    refresh: int | None = None
    beta1: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "warmup", self.warmup, 1)
        checks.optional(checks.whole, self.name, "refresh", self.refresh, 1)
        checks.momentum(self.name, self.beta1, "beta1")

    @property
    def traits(self) -> Traits:
        inner = self.exchange.traits
        payload = "alternating" if self.refresh and inner.payload == "fixed" else inner.payload
        return Traits(elementwise=inner.elementwise, payload=payload, optimizer="Adam", scope=inner.scope)

    def init(self, layout: Layout) -> AdamState:
        return AdamState(torch.zeros(layout.numel, device=layout.device), inner=self.exchange.init(layout))

    def assign(self, slot: Slot, *, small: bool) -> Exchange:
        fallback = BF16() if small else Dense()
        return replace(self, exchange=self.exchange.assign(slot, small=small) or fallback)

    def is_exact(self, step: int) -> bool:
        """Whether the gradients of this step are averaged exactly, and v is updated with their mean."""
        since = step - self.warmup
        if since <= 0 or self.refresh is None:
            return since < 0
        stage = (since // self.refresh + 2).bit_length() - 1  # one step in 2^stage
        return (since - self.refresh * (2**stage - 2)) % 2**stage == 0

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: AdamState, ch: Channel) -> None:
        if self.is_exact(ch.step):
            await ch.mean(x, out)  # out = (1/W) sum g
            if await ch.commit(out.isfinite().all()):
                state.m.lerp_(out.to(state.m.dtype), 1 - self.beta1)  # m = beta1 m + (1 - beta1) out
            return
        u = torch.lerp(state.m, x.to(state.m.dtype), 1 - self.beta1)  # u = beta1 m + (1 - beta1) g
        if await self.pass_on(u.to(x.dtype), out, state, ch):
            state.m.copy_(out)  # out = m = exchange of u

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        sent = super().payload_bytes(layout, size)
        return sent if sent is None or self.refresh is None else layout.dense_bytes

    def exact(self) -> Exchange | None:
        inner = self.exchange.exact()
        return None if inner is None else replace(self, exchange=inner, beta1=0.0)
