"""LAQ: lazy aggregation of quantised differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import checks
from thinwire.channel import Channel
from thinwire.exchange import Exchange
from thinwire.methods.lag import check_bound
from thinwire.parts.lazy import UNCODED, WIDTHS, Lazy, LazyState, Upload


@dataclass(frozen=True)
class LAQ(Lazy):
    """LAG with uploads of a few bits an entry: the difference to the last upload on a grid as wide as it is.

    R = max |g_i - Q_i|;  t = 1 / (2^b - 1);  q = floor((g_i - Q_i + R) / (2 t R) + 1/2)
    Q_i' = Q_i - R + 2 t R q
    rank i skips if |Q_i' - Q_i|^2 <= xi sum_{d=1..D} |out_{k-d}|^2 + 3 (|e_i|^2 + |e_i(last upload)|^2)
    and has been silent for fewer than `max_skip` steps;  e_i = g_i - Q_i'
    out_k = (1/W) sum_i Q_i(last upload)

    What a code loses is part of the next difference. How uploads travel: as for `lag`.

    Args:
        bits: b, of 1, 2, 4 and 8; 32 sends float32, and is then `lag` with `max_skip`.
        window: D.
        xi: the weight of each past step.
        max_skip: the longest silence, in steps.

    Reference: Sun, Chen, Giannakis and Yang, "Communication-efficient distributed learning via lazily
    aggregated quantized gradients", 2019.

    Differences from the paper: no server, every rank keeps the sum; widths that pack into bytes.
    """

    name: ClassVar[str] = "laq"
    bits: int = 4
    window: int = 10
    xi: float = 0.08
    max_skip: int = 100

    def __post_init__(self) -> None:
        checks.one_of(self.name, "bits", self.bits, WIDTHS)
        check_bound(self.name, self.window, self.xi)
        checks.at_least(self.name, "max_skip", self.max_skip, 0)

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
        return bound + 3.0 * (error + last_error)

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0)
