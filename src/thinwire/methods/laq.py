"""LAQ: lazy aggregation of quantised differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import UNCODED, Lazy, LazyState, LazyStep, check_options, lazy_state

# Codes of fewer bits lose so much of a change that the rule skips it, even with entries of short tails.
COARSE = 4


@dataclass(frozen=True)
class QuantisedLazy(Lazy):
    """Base of LAQ and SLAQ: quantised uploads, and a rule that allows for what codes lose."""

    bits: int = 4
    window: int = 10
    xi: float = 0.08
    max_skip: int = 100

    def __post_init__(self) -> None:
        check_options(self.name, self.window, self.xi, self.max_skip, self.bits)

    @property
    def upload_bits(self) -> int:
        return self.bits

    @property
    def warning(self) -> str | None:
        if self.bits >= COARSE or self.max_skip == 0:
            return None
        return (
            f"{self} may diverge: such coarse codes lose so much that the rule skips uploads whatever has "
            f"changed. Take bits={COARSE}, or max_skip=0, which skips nothing"
        )

    def init(self, layout: Layout) -> LazyState:
        return lazy_state(layout, self.window)

    def allowed(self, bound: float, error: float, last_error: float) -> float:
        """The largest change that may be skipped."""
        return rules.allow_code_errors(bound, error, last_error, rules.LAQ_ERROR_WEIGHT)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: LazyState, ch: Channel) -> None:
        step = LazyStep(self, x, state, ch)
        allowed = self.allowed(step.bound(self.xi), step.error, step.counts.error)
        skip = rules.skips(step.change, allowed, step.counts.silence, self.max_skip)
        uploaders = await step.exchange_flags(skip)
        mean = await step.mean_of_uploads(uploaders)
        await step.commit(mean)
        out.copy_(mean)

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0)


@dataclass(frozen=True)
class LAQ(QuantisedLazy):
    """LAG with a few bits per entry of an upload: each tensor's change since its last upload, quantised.

    for every tensor:  R = max |g_i - Q_i|;  t = 1 / (2^b - 1)
        q = floor((g_i - Q_i + R) / (2 t R) + 1/2);  Q_i' = Q_i - R + 2 t R q
    rank i skips if |Q_i' - Q_i|^2 <= xi sum_{d=1..D} |out_{k-d}|^2 + 3 (|e_i|^2 + |e_i(last upload)|^2)
    and has been silent for fewer than `max_skip` steps;  e_i = g_i - Q_i', the norms over all tensors
    out_k = (1/W) sum_i Q_i(last upload)

    What a code loses is part of the next difference; |e_i| <= t R in every entry. Uploads travel as those of
    `lag` do.

    Args:
        bits: b, of 1, 2, 4 and 8; 32 sends float32, and is then `lag` with `max_skip`. With 1 or 2 bits the
            errors in the rule outweigh any change: most uploads are skipped, and training may diverge.
        window: D.
        xi: the weight of each past step.
        max_skip: the longest silence, in steps.

    Differences from the paper: no server, every rank keeps the sum; widths that pack into bytes; a radius R
    for each tensor, where the paper has one for the whole model.
    """

    name: ClassVar[str] = "laq"
    formula = "1 + ceil(n * bits / 8) + 4"
    formula_note = "if every rank uploads; a rank that skips sends 1 byte"
    reference = (
        'Sun, Chen, Giannakis and Yang, "Communication-efficient distributed learning via lazily aggregated '
        'quantized gradients", 2019'
    )
