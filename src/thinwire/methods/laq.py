"""LAQ: lazy aggregation of quantised differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire.core import Channel, Exchange, HostWaits
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import UNCODED, Lazy, LazyState, LazyStep


@dataclass(frozen=True)
class QuantisedLazy(Lazy):
    """Base of LAQ and SLAQ: quantised uploads, and a rule that allows for the errors of codes.

    Args:
        bits: b, the bits per entry of an upload: 1 to 8. 32 sends float32. With few bits (1 to 3, for
            `slaq` 1 and 2) the errors in the rule outweigh any change, and training may diverge.
    """

    formula = "1 + ceil(n * bits / 8) + 4"
    waits = HostWaits(7, 4, 1, "the rule decides on the host, from the radius and the norms of each tensor")
    enough_bits: ClassVar[int] = 4
    """Fewer lose so much of a change that the rule skips it, even if no entry stands out."""

    bits: int = 4
    window: int = 10
    xi: float = 0.08
    max_skip: int = 100

    @property
    def warning(self) -> str | None:
        if self.bits >= self.enough_bits or self.max_skip == 0:
            return None
        return (
            f"{self} may diverge: codes this coarse lose so much that the rule skips uploads whatever has "
            f"changed. Take bits={self.enough_bits}, or max_skip=0, which skips nothing"
        )

    def allowed(self, step: LazyStep) -> float:
        """The largest change that may be skipped."""
        return rules.allow_code_errors(
            step.bound(self.xi), step.error, step.counts.error, rules.LAQ_ERROR_WEIGHT
        )

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: LazyState, ch: Channel) -> None:
        step = LazyStep(self, x, state, ch)
        skip = rules.skips(step.change, self.allowed(step), step.counts.silence, self.max_skip)
        uploaders = await step.exchange_flags(skip)
        mean = await step.mean_of_uploads(uploaders)
        if await step.commit(mean):
            self.follow(x, state, ch)
        out.copy_(mean)

    def follow(self, x: torch.Tensor, state: LazyState, ch: Channel) -> None:
        """What else a committed step leaves behind."""

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0)


@dataclass(frozen=True)
class LAQ(QuantisedLazy):
    """LAG with a few bits per entry: a rank uploads the quantised change since its last upload.

        for every tensor:  R = max |g_i - Q_i|;  t = 1 / (2^b - 1)
            q = floor((g_i - Q_i + R) / (2 t R) + 1/2);  Q_i' = Q_i - R + 2 t R q
        e_i = g_i - Q_i', norms over all tensors;  R_k = xi sum_{d=1..D} |out_{k-d}|^2
        rank i skips if |Q_i' - Q_i|^2 <= R_k + 3 (|e_i|^2 + |e_i(last upload)|^2)
        and it has skipped fewer than `max_skip` steps;  out_k = (1/W) sum_i Q_i(last upload)

    What a code loses is part of the next difference; no entry of e_i exceeds t R. Uploads reach the other
    ranks as those of `lag` do.

    Differences from the paper: there is no server; every rank keeps the sum. Widths pack into bytes. Every
    tensor has its own radius R; the paper has one for the whole model.
    """

    name = "laq"
    use_when = """Every step uses the gradient of all local data with plain SGD, as for `lag`, and uploads
    should be small: a few bits per entry, and none if little has changed."""
    avoid_when = """You train with minibatches (take `lasg` or `slaq`), momentum or Adam. Never use 1 to 3
    bits with skipping: the rule then skips real changes, and training may diverge."""
    reference = """Sun, Chen, Giannakis and Yang, "Communication-efficient distributed learning via lazily
    aggregated quantized gradients", 2019"""
