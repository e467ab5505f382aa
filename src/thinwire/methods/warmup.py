"""Dense steps first, then a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.errors import ConfigError
from thinwire.methods.dense import exact_mean
from thinwire.methods.route import Route
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class Warmup(Exchange):
    """The exact mean for the first steps, when gradients change fast, and a method from then on.

    The steps are the session's: their number is in the checkpoint, so a resumed run does not warm up again.

    Args:
        steps: how many dense steps come first.
        method: what follows.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("warmup(steps=500, method=powersgd(rank=2))"))
        'warmup(steps=500, method=powersgd(rank=2))'
    """

    name = "warmup"
    formula = ""
    formula_note = "the bytes of its method, once the dense steps are over"
    steps: int = 100
    method: Exchange = TopK()

    def __post_init__(self) -> None:
        checks.whole(self.name, "steps", self.steps, 0)
        checks.exchange(self.name, "method", self.method)
        if isinstance(self.method, Route | Warmup):
            raise ConfigError(
                f"warmup: {self.method.name} cannot be inside it; use warmup in the route's methods"
            )
        if self.method.traits.optimizer == "no momentum":
            raise ConfigError(
                f"warmup: {self.method.name} has the momentum itself, and dense steps would have none; "
                "use its own warmup option if it has one, or momentum=0"
            )

    @property
    def traits(self) -> Traits:
        return replace(self.method.traits, elementwise=False, single_mean=False)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return (*self.method.kernel_families, "finite")

    @property
    def rounding(self) -> float:
        return self.method.rounding

    @property
    def reconcile_every(self) -> int | None:
        return self.method.reconcile_every

    @property
    def warning(self) -> str | None:
        return self.method.warning

    def init(self, layout: Layout) -> State:
        return self.method.init(layout)

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        return None if small or self.method.assign(slot, small=False) is None else self

    def residual(self, state: Any) -> torch.Tensor | None:
        return self.method.residual(state)

    def stale_parameters(self, state: Any) -> torch.Tensor | None:
        return self.method.stale_parameters(state)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        await (exact_mean(x, out, ch) if ch.step < self.steps else self.method.run(x, out, state, ch))

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        return self.method.payload_bytes(layout, size)

    def exact(self) -> Exchange | None:
        inner = self.method.exact()
        return None if inner is None else replace(self, method=inner)
