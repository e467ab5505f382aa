"""LAG: gradients that have hardly changed are not sent again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.methods.families.lazy import UNCODED, Counts, Lazy, LazyState, Upload, squared_norm


@dataclass(frozen=True)
class LAG(Lazy):
    """Averages the gradients that the ranks last uploaded; a rank uploads when its own has changed enough.

    out_k = (1/W) sum_i g_i(last upload);  R_k = xi sum_{d=1..D} |out_{k-d}|^2
    rule "wk": rank i skips if |g_i(now) - g_i(last upload)|^2 <= R_k
    rule "ps": rank i skips if L_i^2 |theta_k - theta(last upload of i)|^2 <= R_k

    Flags come first, one byte a rank. Then nothing travels if nobody uploads; the uploads by broadcasts or
    over a star if few do; or one mean of everything, where that is less for the busiest rank. An upload is
    the difference to the last one, in float32; every rank keeps the sum of all uploads, in float64.

    Made for full local gradients: with minibatches the rule sees their noise (see `lasg`, `slaq`). R_k is
    right for plain SGD, whose step is the learning rate times `out`.

    Args:
        rule: "wk", or "ps", which looks at the way of the parameters in place of the gradient. L_i is the
            largest ratio of the two seen at an upload. To save the computation of gradients as well, see
            `thinwire.convex.lazy_gd`.
        window: D, the steps that R_k adds up.
        xi: their weight; 0 skips nothing. The paper has 0.1 for "wk" and 1 for "ps".

    Differences from the paper: no server, every rank keeps the sum; "ps" estimates the smoothness L_i, which
    the paper takes as known, and in a session saves bytes only, as the gradient is there already.
    """

    name: ClassVar[str] = "lag"
    formula = "1 + 4 * n"
    formula_note = "if every rank uploads; a rank that skips sends 1 byte"
    reference = (
        'Chen, Giannakis, Sun and Yin, "LAG: lazily aggregated gradient for communication-efficient '
        'distributed learning", 2018'
    )
    rule: Literal["wk", "ps"] = "wk"
    window: int = 10
    xi: float = 0.1

    def __post_init__(self) -> None:
        checks.one_of(self.name, "rule", self.rule, ("wk", "ps"))
        check_bound(self.name, self.window, self.xi)

    @property
    def upload_bits(self) -> int:
        return UNCODED

    @property
    def bound(self) -> tuple[int, float]:
        return self.window, self.xi

    @property
    def keeps_movement(self) -> bool:
        return self.rule == "ps"

    def judged(self, mine: Upload, x: torch.Tensor, state: LazyState, ch: Channel) -> float:
        if self.rule == "wk":
            return mine.size
        smoothness = Counts.of(state).smoothness
        return smoothness**2 * squared_norm(state.moved) if smoothness else math.inf

    def exact(self) -> Exchange:
        return replace(self, xi=0.0)


def check_bound(method: str, window: object, xi: object) -> None:
    checks.whole(method, "window", window, 1)
    checks.not_negative(method, "xi", xi)
