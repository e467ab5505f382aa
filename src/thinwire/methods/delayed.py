"""A method whose exchange runs beside the next step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from thinwire.core import Channel, Exchange, Layout, Link, Slot, Traits, checks
from thinwire.core.exchange import Levels
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class Delayed(Exchange):
    """The optimizer gets the mean of the step before, while the mean of the present step is on its way.

        theta_{t+1} = theta_t - gamma m_{t-1},  m_t = exchange of the gradients at theta_t,  m_{-1} = 0

    The exchange of step t runs during the forward and the backward pass of step t+1, as one exchange of the
    whole model. The network is hidden if it takes less time than a step. All replicas stay equal. The first
    step gets zeros. If a gradient is not finite, the step after it is skipped, on all ranks alike. What is
    under way is part of the checkpoint. `attach(model, method, delay=1)` means the same.

    Args:
        method: the method of the exchange.
        delay: 1, or "auto": without delay as long as the exchange is hidden behind the backward pass. Every
            32 steps the ranks compare how long they waited. The delay begins when waiting takes more than a
            tenth of a step. It ends when the exchange takes less than a twentieth, or less than half of what
            it took when the delay began. The first step with delay gets zeros, the first without it the sum
            of two means, so nothing is lost.

    Differences from the paper: no correction with the rank's own gradient, which makes replicas differ.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("delayed(method=topk(ratio=0.01))"))
        'delayed(method=topk(ratio=0.01))'
    """

    name = "delayed"
    family = "combining"
    use_when = """The network takes a good part of a step even with a method that compresses, and a gradient
    that is one step old does no harm: small learning rates, long runs."""
    avoid_when = """The exchange is hidden behind the backward pass already, or the learning rate is near the
    largest stable one: a delay halves it. Lazy methods (`lag`) and those that let replicas drift (`a2sgd`)
    are refused."""
    formula = ""
    formula_note = "the bytes of its method"
    rounds_per_step = "those of its method, once for the whole model"
    compute = "that of its method, and two copies of the gradients (none for `topk` and the like on a CPU)"
    reference = """Langford, Smola and Zinkevich, "Slow learners are fast", 2009"""
    method: Exchange = TopK()
    delay: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        checks.exchange(self.name, "method", self.method, two_levels=True)
        checks.one_of(self.name, "delay", self.delay, (1, "auto"))
        traits = self.method.traits
        if not traits.consensus or traits.optimizer == "plain SGD" or traits.second_gradient:
            what = "has rules about the steps just taken" if traits.consensus else "lets replicas drift"
            raise ConfigError(f"{self.name}: {self.method.name} {what}; take another method")
        if self.delay == "auto" and traits.optimizer == "Adam":
            raise ConfigError(f"{self.name}: {self.method.name} needs delay=1: its momenta do not add up")

    @property
    def traits(self) -> Traits:
        return replace(
            self.method.traits,
            unbiased=False,  # of the gradients of another step
            elementwise=False,
            single_mean=False,
            scatters=False,
            scope="model",
            delayed=True,
        )

    @property
    def levels(self) -> Levels | None:
        return self.method.levels

    @property
    def rounding(self) -> float:
        return self.method.rounding

    def resolved(self, local: int | None = None) -> Exchange:
        return replace(self, method=self.method.resolved(local))

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        return self.method.assign(slot, small=small)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        raise ThinwireError("delayed does not run itself: the session delays what its method averages")

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        return self.method.payload_bytes(layout, size, link)
