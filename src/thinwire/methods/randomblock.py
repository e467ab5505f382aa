"""Random-block sparsification: the same contiguous block on all ranks, in one mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Link, Traits, checks
from thinwire.core.traits import Scope
from thinwire.methods.families.feedback import Residual, poisoned
from thinwire.methods.families.sparse import check_scale, count_of


@dataclass(frozen=True)
class RandomBlock(Exchange):
    """All ranks average the same block of k neighbouring entries, at a new random place in each step.

        u_i = g_i + e_i;  s uniform on {0..n-1}, the same on all ranks;  B = {s, ..., s+k-1} mod n
        out[B] = (1/W) sum_i u_i[B];  e_i = u_i with e_i[B] = 0

    No index is sent, memory is read in one run, and the collective is an all-reduce. The block wraps around
    the end, so every entry is sent with probability k/n.

    Args:
        ratio: the share of the entries that is sent: k = max(1, ratio * n). An entry waits 1/ratio steps on
            average and then brings the sum of its gradients, so the learning rate must be smaller.
        feedback: add what is not sent to the next gradient.
        scale: without feedback: "unbiased" scales the block by n/k, which makes the result unbiased, with a
            variance of n/k - 1 times the squared gradient. None sends it as it is: the step is k/n as long on
            average and never longer than the mean gradient, so momentum stays stable.
        scope: one block in each "tensor", in each "bucket", or in the whole "model".

    Differences from the paper: the block wraps around. A block that is cut off at the end would favour the
    entries in the middle.
    """

    name = "randomblock"
    family = "shared"
    use_when = """There are many workers and the selection must cost next to nothing: one all-reduce of
    contiguous memory, without an index."""
    avoid_when = """Accuracy matters more than speed: a block brings the gradients of 1/ratio steps at once.
    With feedback=False and momentum in the optimizer take scale=None: scaled by n/k, training broke down in
    the reproduction."""
    formula = "4 * k"
    rounds_per_step = "1 (a mean)"
    compute = "one pass to update the residual"
    reference = 'Eghlidi and Jaggi, "Sparse communication for training deep networks", 2020'
    ratio: float = 0.1
    feedback: bool = True
    scope: Scope = "tensor"
    scale: Literal["unbiased"] | None = "unbiased"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.flag(self.name, "feedback", self.feedback)
        check_scale(self.name, self.scale, self.feedback)
        checks.scope(self.name, self.scope)

    @property
    def traits(self) -> Traits:
        unbiased = self.ratio == 1 or (not self.feedback and self.scale is not None)
        return Traits(conserves=self.feedback, unbiased=unbiased, scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback")

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, k = x.numel(), count_of(self.ratio, x.numel())
        s = ch.shared_seed() % max(n, 1)  # uniform, and equal on all ranks
        first = min(k, n - s)  # B = {s, ..., s+k-1} mod n: so many at s, the others at 0
        u = torch.cat([x[s : s + first], x[: k - first]]).float()
        if self.feedback:
            u += torch.cat([state.error[s : s + first], state.error[: k - first]])  # u = g + e, on B
        u = poisoned(u, x)
        mean = await ch.mean(u, u)
        if await ch.commit(kernels.finite_flag(mean)) and self.feedback:
            kernels.feedback_block(state.error, x, s, k, clear=out)  # e = u, and 0 on B;  out = 0
        else:
            out.zero_()
        if not self.feedback and self.scale is not None:
            mean *= n / max(k, 1)
        out[s : s + first], out[: k - first] = mean[:first], mean[first:]  # out[B] = (1/W) sum u[B]

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return 4 * count_of(self.ratio, layout.numel)
