"""LAQ: lazy aggregation of quantised differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.methods.families.lazy import UNCODED, WIDTHS, Lazy, LazyState, Upload
from thinwire.methods.lag import check_bound

# Codes of fewer bits lose so much of a change that the rule skips it, even with entries of short tails.
COARSE = 4


@dataclass(frozen=True)
class QuantisedLazy(Lazy):
    """Base of LAQ and SLAQ: uploads on a grid, and a rule that allows for what codes lose."""

    error_weight: ClassVar[float]
    """Of the squared errors, now and at the last upload, in what may be skipped."""
    bits: int = 4
    window: int = 10
    xi: float = 0.08
    max_skip: int = 100

    def __post_init__(self) -> None:
        checks.one_of(self.name, "bits", self.bits, WIDTHS)
        check_bound(self.name, self.window, self.xi)
        checks.whole(self.name, "max_skip", self.max_skip, 0)

    @property
    def warning(self) -> str | None:
        if self.bits >= COARSE or self.max_skip == 0:
            return None
        return (
            f"{self} may diverge: such coarse codes lose so much that the rule skips uploads whatever has "
            f"changed. Take bits={COARSE}, or max_skip=0, which skips nothing"
        )

    @property
    def upload_bits(self) -> int:
        return self.bits

    @property
    def bound(self) -> tuple[int, float]:
        return self.window, self.xi

    @property
    def longest_silence(self) -> int:
        return self.max_skip

    def judged(self, mine: Upload, x: torch.Tensor, state: LazyState, ch: Channel) -> float:
        return mine.size

    def allowed(self, bound: float, error: float, last_error: float) -> float:
        return bound + self.error_weight * (error + last_error)

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0)


@dataclass(frozen=True)
class LAQ(QuantisedLazy):
    """LAG with uploads of a few bits an entry: a tensor's change since its last upload, on a grid as wide.

    for every tensor:  R = max |g_i - Q_i|;  t = 1 / (2^b - 1)
        q = floor((g_i - Q_i + R) / (2 t R) + 1/2);  Q_i' = Q_i - R + 2 t R q
    rank i skips if |Q_i' - Q_i|^2 <= xi sum_{d=1..D} |out_{k-d}|^2 + 3 (|e_i|^2 + |e_i(last upload)|^2)
    and has been silent for fewer than `max_skip` steps;  e_i = g_i - Q_i', the norms over all tensors
    out_k = (1/W) sum_i Q_i(last upload)

    What a code loses is part of the next difference; |e_i| <= t R in every entry. How uploads travel: as for
    `lag`.

    Args:
        bits: b, of 1, 2, 4 and 8; 32 sends float32, and is then `lag` with `max_skip`. With 1 or 2 the errors
            in the rule outweigh any change: much is skipped, and training may diverge.
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
    error_weight: ClassVar[float] = 3.0
