"""A2SGD: two means instead of a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Link, State, Traits, checks
from thinwire.core.traits import Scope
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class A2SGD(Exchange):
    """Averages two numbers per step: the mean of the entries that are at least 0, and the mean of the others.

        P_i = {j: g_ij >= 0};  N_i = the others;  mu+_i, mu-_i = the means of g_i on P_i and on N_i
        out_i = g_i + (mean_l mu+_l - mu+_i) on P_i + (mean_l mu-_l - mu-_i) on N_i

    Every rank keeps its own gradient, only shifted, so the replicas drift apart. With n entries the two means
    of different ranks hardly differ (about 1/sqrt(n)): without more, this is training without communication.
    So the parameters themselves are averaged every `average_every` steps: before the next forward pass under
    DDP, at the beginning of `Session.average` in your own loop, or where you call `session.reconcile()`. Call
    it at the end, before you save or evaluate. If `optimizer=` is given, its momenta are averaged too.
    `session.spread()` measures how far apart the replicas are.

    Args:
        average_every: the number of steps between two averages of the parameters. None never averages them.
        allow_drift: must be True for `average_every=None`: every rank then ends with its own model.
        scope: two means for the whole "model", or for each "bucket" or "tensor".

    Differences from the paper: the paper does not average the parameters. Small tensors are averaged exactly,
    as by every method here. Do not use it with DDP's `join()`: ranks without data make no forward pass.
    """

    name = "a2sgd"
    family = "approximate"
    use_when = "You study the method itself, or compare it with training without communication."
    avoid_when = """You want one common model after every step: the replicas differ. In the reproduction the
    two means added nothing to averaging the parameters as often, which `localsgd` does by itself."""
    formula = "8"
    formula_note = "plus itemsize * n once every average_every steps"
    rounds_per_step = "1 (a mean of two numbers), and 1 more when the parameters are averaged"
    compute = "one pass for the two means, one to shift the gradient"
    reference = """Bhattacharya, Yu and Chowdhury, "O(1) communication for distributed SGD through two-level
    gradient averaging", 2021"""
    average_every: int | None = 32
    allow_drift: bool = False
    scope: Scope = "model"

    def __post_init__(self) -> None:
        checks.flag(self.name, "allow_drift", self.allow_drift)
        checks.scope(self.name, self.scope)
        checks.optional(checks.whole, self.name, "average_every", self.average_every, 1)
        if self.average_every is None and not self.allow_drift:
            raise ConfigError(
                f"{self.name}: with average_every=None the replicas are never averaged. Give a number of "
                "steps, or allow_drift=True if every rank may end with its own model"
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
        own = kernels.two_means(x)  # mu+_i, mu-_i
        mean = await ch.mean(own)  # mean_l mu+_l, mean_l mu-_l
        await ch.commit(mean.isfinite().all())
        kernels.a2sgd_apply(x, own, mean, out)  # out = g + (mean mu+ - mu+_i) on P + the same on N

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        """Without the averaging of the parameters, which is not part of a step."""
        return 8
