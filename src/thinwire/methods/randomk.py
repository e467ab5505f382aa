"""Random-k sparsification: k coordinates at random, the same on all ranks or each rank its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits
from thinwire.errors import ConfigError
from thinwire.methods.families.memories import Residual, SparseMemory
from thinwire.methods.families.selectors import AtRandom, Selector
from thinwire.methods.families.sparse import Sparse, WithRatio


@dataclass(frozen=True)
class RandomK(Sparse, WithRatio):
    """Every rank sends k entries drawn at random, without replacement.

    u_i = g_i + e_i;  I (or I_i) uniform among the sets of k coordinates;  c_i = u_i on I
    e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n). An entry waits 1/ratio steps on
            average and then comes with all that has piled up, so the learning rate must stay below it.
        shared: all ranks draw the same coordinates (the default): no index travels, and one mean does.
        feedback: keep what is not sent (the default). Without it the values are scaled by n/k, which makes
            the estimate unbiased, with a variance n/k - 1 times the gradient's square.
        values, scope, reduce, warmup: as for all methods that select their own indices; with `shared` the
            reduction is always a mean and the values are sent as they are.

    Reference: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018.
    """

    name: ClassVar[str] = "randomk"
    ratio: float = 0.1
    shared: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag(self.name, "shared", self.shared)
        if self.shared and self.values is not None:
            raise ConfigError(f"{self.name}: values need shared=False; a mean cannot add coded values")

    def selector(self, ch: Channel) -> Selector:
        return AtRandom(ch.shared_rng() if self.shared else ch.private_rng(), not self.feedback)

    def density(self) -> float:
        return self.ratio

    @property
    def traits(self) -> Traits:
        fixed = self.shared or self.reduce == "gather"
        return Traits(
            conserves=self.feedback,
            unbiased=not self.feedback and fixed,
            payload="fixed" if fixed else "data-dependent",
            scope=self.scope,
        )

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        if not self.shared:
            await super().run(x, out, state, ch)
            return
        with SparseMemory(state.error, x, out) as memory:
            indices, values = memory.take(self.selector(ch), self.count(x.numel(), ch.step))
            values = await ch.mean(values, values)
            memory.close(await ch.commit(kernels.all_finite(values)))
            kernels.scatter_mean([indices], [values], out)

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        if self.shared:
            return 4 * self.count(layout.numel, self.warmup)
        return super().payload_bytes(layout, size)

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, values=None, reduce="gather")
