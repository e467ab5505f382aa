"""Dense steps first, then a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.core import Channel, Exchange, Layout, Link, Slot, State, Traits, checks
from thinwire.errors import ConfigError
from thinwire.methods.dense import exact_mean
from thinwire.methods.route import Route
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class Warmup(Exchange):
    """Averages exactly in the first steps, when gradients change fast, and then by another method.

    The step number is part of the checkpoint, so a resumed run does not warm up again.

    Args:
        steps: the number of dense steps.
        method: the method that follows.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("warmup(steps=500, method=powersgd(rank=2))"))
        'warmup(steps=500, method=powersgd(rank=2))'
    """

    name = "warmup"
    family = "combining"
    use_when = """A method loses most in the first steps, when gradients change fast: for example `topk` or
    `powersgd` on a new model."""
    avoid_when = """The dense steps would take a large part of the run. Methods that keep the momentum
    themselves (`dgc`, `sketched`, `heavyball`) are refused; `dgc` has its own `warmup` option."""
    formula = ""
    formula_note = "the bytes of its method, after the dense steps"
    rounds_per_step = "1 (a mean) in the dense steps, then those of the method"
    compute = "none in the dense steps, then that of the method"
    steps: int = 100
    method: Exchange = TopK()

    def __post_init__(self) -> None:
        checks.whole(self.name, "steps", self.steps, 0)
        checks.exchange(self.name, "method", self.method)
        if isinstance(self.method, Route | Warmup):
            raise ConfigError(
                f"warmup: {self.method.name} cannot be its method; use warmup for the methods of a route"
            )
        if self.method.traits.optimizer in ("no momentum", "Adam"):
            raise ConfigError(
                f"warmup: {self.method.name} keeps the momentum itself, so dense steps would have none; use "
                "its own warmup option if it has one, or momentum=0"
            )

    @property
    def traits(self) -> Traits:
        return replace(self.method.traits, elementwise=False, single_mean=False, scatters=False)

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

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        return self.method.payload_bytes(layout, size, link)

    def exact(self) -> Exchange | None:
        inner = self.method.exact()
        return None if inner is None else replace(self, method=inner)
