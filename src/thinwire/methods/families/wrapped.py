"""For methods that send something of their own through another exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch

from thinwire.core import Channel, Exchange, Layout, Link, State, checks
from thinwire.errors import ConfigError


@dataclass
class Wrapping(State):
    """A state with that of the inner exchange in it. Both are saved, moved and scaled alike."""

    inner: State = field(kw_only=True)

    @property
    def parts(self) -> tuple[State, ...]:
        return (*super().parts, *self.inner.parts)


class Around(Exchange):
    """A method around `exchange`, which gives all ranks the same result and knows no momentum."""

    family = "combining"
    formula = ""
    exchange: Exchange

    def __post_init__(self) -> None:
        checks.exchange(self.name, "exchange", self.exchange)
        traits = self.exchange.traits
        if not traits.consensus or traits.optimizer != "any" or traits.second_gradient:
            raise ConfigError(
                f"{self.name}: {self.exchange.name} cannot be its exchange: it takes one with the same "
                "result on all ranks, without momentum and rules about steps, such as efsign, topk or qsgd"
            )

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return self.exchange.kernel_families

    @property
    def rounding(self) -> float:
        return self.exchange.rounding

    @property
    def warning(self) -> str | None:
        return self.exchange.warning

    def residual(self, state: Any) -> torch.Tensor | None:
        return self.exchange.residual(cast(Wrapping, state).inner)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        return self.exchange.payload_bytes(layout, size, link)

    async def pass_on(self, x: torch.Tensor, out: torch.Tensor, state: Wrapping, ch: Channel) -> bool:
        """Run the exchange; True if the step is committed."""
        await self.exchange.run(x, out, state.inner, ch)
        if ch.committed is None:  # a plain mean has nothing to commit
            return await ch.commit(out.isfinite().all())
        return ch.committed
