"""LAG: gradients that have hardly changed are not sent again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import Counts, Lazy, LazyState, LazyStep, check_options, lazy_state


@dataclass(frozen=True)
class LAG(Lazy):
    """Averages the gradients that the ranks last uploaded; a rank uploads when its own has changed enough.

    out_k = (1/W) sum_i g_i(last upload);  R_k = xi sum_{d=1..D} |out_{k-d}|^2
    rule "wk": rank i skips if |g_i(now) - g_i(last upload)|^2 <= R_k
    rule "ps": rank i skips if L_i^2 |theta_k - theta(last upload of i)|^2 <= R_k

    Flags come first, one byte per rank. If no rank uploads, nothing else travels. If few upload, they
    broadcast their uploads or collect them over a star. If many upload, one mean of everything is cheaper for
    the busiest rank. An upload is the difference to the last one, in float32; every rank keeps the sum of
    all uploads, in float64.

    Made for full local gradients: with minibatches the rule sees their noise (see `lasg`, `slaq`). R_k is
    right for plain SGD, whose step is the learning rate times `out`.

    Args:
        rule: "wk", or "ps", which looks at how far the parameters have moved in place of the gradient. L_i
            is the largest ratio of the two seen at an upload. To save the computation of gradients as well,
            see `thinwire.convex.lazy_gd`.
        window: D, the number of steps in R_k.
        xi: the weight of each; 0 skips nothing. The paper has 0.1 for "wk" and 1 for "ps".

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
        check_options(self.name, self.window, self.xi)

    def init(self, layout: Layout) -> LazyState:
        return lazy_state(layout, self.window, movement=self.rule == "ps")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: LazyState, ch: Channel) -> None:
        step = LazyStep(self, x, state, ch)
        change = step.change if self.rule == "wk" else self._change_by_movement(step, state)
        skip = rules.skips(change, step.bound(self.xi))
        uploaders = await step.exchange_flags(skip)
        mean = await step.mean_of_uploads(uploaders)
        if await step.commit(mean) and self.rule == "ps":
            self._follow(step, state, mean * ch.context.lr)
        out.copy_(mean)

    def _change_by_movement(self, step: LazyStep, state: LazyState) -> float:
        smoothness = step.counts.smoothness
        return (
            rules.change_by_movement(smoothness, step.squared_norm(state.moved)) if smoothness else math.inf
        )

    def _follow(self, step: LazyStep, state: LazyState, movement: torch.Tensor) -> None:
        """Estimate L_i at an upload, and keep how far the parameters have moved since."""
        if step.uploads:
            distance = step.squared_norm(state.moved)
            if distance and not step.restarts:
                smoothness = max(step.counts.smoothness, math.sqrt(step.change / distance))
                Counts.of(state.counts)._replace(smoothness=smoothness).write(state.counts)
            state.moved.zero_()
        state.moved += movement

    def exact(self) -> Exchange:
        return replace(self, xi=0.0)
