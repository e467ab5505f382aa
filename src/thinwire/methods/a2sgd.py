"""A2SGD: two means in place of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class A2SGD(Exchange):
    """Averages two numbers per step: the mean of the entries from 0 up, and the mean of those below.

    P_i = {j: g_ij >= 0}, N_i = the others;  mu+_i, mu-_i = the means of g_i on P_i and on N_i
    out_i = g_i + (mean_l mu+_l - mu+_i) on P_i + (mean_l mu-_l - mu-_i) on N_i

    Every rank keeps its own gradient, only shifted, so replicas drift apart; between n entries the two
    means hardly differ (about 1/sqrt(n)), so without more this is training without communication. Hence
    the parameters themselves are averaged every so many steps, which is what makes replicas one model:
    before the next forward pass under DDP, at the beginning of `Session.average` in a loop of your own
    (or where you call `session.reconcile()`: do so at the end, before you save or evaluate). With
    `optimizer=` given, its momenta are averaged too. `session.spread()` tells how far replicas are apart.

    Args:
        average_every: steps from one averaging of the parameters to the next; None never does.
        allow_drift: must be True for `average_every=None`: ranks then end with different models.
        scope: two means for the whole "model", or for each "bucket" or "tensor".

    Differences from the paper: the averaging of parameters is ours; the paper does not do it. Small tensors
    are averaged exactly, as by every method here. Under DDP's `join()`, ranks that have run out of data
    make no forward pass: do not use both.
    """

    name = "a2sgd"
    formula = "8"
    formula_note = "plus itemsize * n once every average_every steps"
    reference = (
        'Bhattacharya, Yu and Chowdhury, "O(1) communication for distributed SGD through two-level gradient '
        'averaging", 2021'
    )
    average_every: int | None = 32
    allow_drift: bool = False
    scope: Scope = "model"

    def __post_init__(self) -> None:
        checks.flag(self.name, "allow_drift", self.allow_drift)
        checks.scope(self.name, self.scope)
        checks.optional(checks.whole, self.name, "average_every", self.average_every, 1)
        if self.average_every is None and not self.allow_drift:
            raise ConfigError(
                f"{self.name}: with average_every=None nothing ever brings the replicas together; give a "
                "number of steps, or say allow_drift=True if every rank shall end with a model of its own"
            )

    @property
    def traits(self) -> Traits:
        return Traits(consensus=False, scope=self.scope)

    @property
    def reconcile_every(self) -> int | None:
        return self.average_every

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("a2sgd",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        own = torch.tensor(kernels.two_means(x), dtype=torch.float32, device=x.device)  # mu+_i, mu-_i
        mean = await ch.mean(own)  # mean_l mu+_l, mean_l mu-_l
        await ch.commit(bool(mean.isfinite().all()))
        own_plus, own_minus = cast("list[float]", own.tolist())
        plus, minus = cast("list[float]", mean.tolist())
        kernels.a2sgd_apply(
            x, own_plus, own_minus, plus, minus, out
        )  # out = g + (plus - own_plus) on P + ...

    def payload_bytes(self, layout: Layout, size: int) -> int:
        """Without the averaging of parameters, which is apart from the steps."""
        return 8
