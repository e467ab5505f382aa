"""Dense steps first, then a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, Traits
from thinwire.core.layout import Layout, Slot
from thinwire.errors import ConfigError
from thinwire.methods.route import Route, parsed


@dataclass(frozen=True)
class Warmup(Exchange):
    """The exact mean for the first steps, when gradients change fast, and a method from then on.

    The step that counts is the session's: it is in the checkpoint, so a resumed run does not warm up again.

    Args:
        steps: so many dense steps first.
        method: the method string of what follows.

    Example:
        >>> import thinwire
        >>> thinwire.parse("warmup(steps=500, method='powersgd(rank=2)')")
        Warmup(steps=500, method='powersgd(rank=2)')
    """

    name: ClassVar[str] = "warmup"
    steps: int = 100
    method: str = "topk(ratio=0.01)"

    def __post_init__(self) -> None:
        checks.at_least(self.name, "steps", self.steps, 0)
        if isinstance(self.inner, Route | Warmup):
            raise ConfigError(
                f"warmup: {self.inner.name} cannot be inside it; use warmup in the route's methods"
            )

        if self.inner.traits.owns_momentum:
            raise ConfigError(
                f"warmup: {self.inner.name} keeps the momentum itself, and dense steps would have none; "
                "use its own warmup option if it has one, or momentum=0"
            )

    @property
    def inner(self) -> Exchange:
        return parsed(self.method)

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, elementwise=False, memoryless=False)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return (*self.inner.kernel_families, "finite")

    def init(self, layout: Layout) -> State:
        return self.inner.init(layout)

    def accepts(self, slot: Slot) -> bool:
        return self.inner.accepts(slot)

    def pending(self, state: Any) -> torch.Tensor | None:
        return self.inner.pending(state)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        if ch.step >= self.steps:
            await self.inner.run(x, out, state, ch)
            return
        await ch.mean(x, out)
        await ch.settled(kernels.all_finite(out))

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        return self.inner.payload_bytes(layout, size)

    def exact(self) -> Exchange | None:
        inner = self.inner.exact()
        return None if inner is None else replace(self, method=str(inner))
