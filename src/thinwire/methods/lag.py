"""LAG: gradients that have hardly changed are not sent again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from thinwire.core import Channel, Exchange, Layout, checks
from thinwire.core.channel import StepContext
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import Counts, Lazy, LazyState, LazyStep, squared_norm

XI = {"wk": 0.1, "ps": 1.0}


@dataclass(frozen=True)
class LAG(Lazy):
    """Averages the last uploads of all ranks; a rank uploads its gradient when it has changed enough.

        out_k = (1/W) sum_i g_i(last upload);  R_k = xi sum_{d=1..D} |out_{k-d}|^2
        rule "wk": rank i skips if |g_i(now) - g_i(last upload)|^2 <= R_k
        rule "ps": rank i skips if L_i^2 |theta_k - theta(last upload of i)|^2 <= R_k

    First the ranks exchange flags of one byte. If no rank uploads, nothing else is sent. If few upload, they
    broadcast their uploads, or the first uploader collects them. If many upload, one mean of everything is
    cheaper for the busiest rank. An upload is the difference to the last one, in float32. Every rank keeps
    the sum of all last uploads, in float64. R_k assumes plain SGD: its step is the learning rate times `out`.

    Args:
        rule: "wk" compares gradients. "ps" compares how far the parameters have moved; L_i is the largest
            ratio of the two at an upload so far. It knows beforehand whether a rank uploads: with
            `session.wants_gradient()` the others skip computing their gradients as well.
        xi: the weight of each past step. 0 skips nothing. None takes the paper's: 0.1 for "wk", 1 for "ps".

    Differences from the paper: there is no server; every rank keeps the sum. "ps" estimates the smoothness
    L_i, which the paper knows.
    """

    name = "lag"
    use_when = """Every step uses the gradient of all local data with plain SGD, and the workers differ:
    gradients that have hardly changed are not sent again. Made for convex problems."""
    avoid_when = """You train with minibatches (the rule sees their noise), momentum or Adam. Two float32
    uploads in a step cost as much as `dense`, so it saves only if most steps have one uploader or none."""
    formula = "1 + 4 * n"
    reference = """Chen, Giannakis, Sun and Yin, "LAG: lazily aggregated gradient for communication-efficient
    distributed learning", 2018"""
    rule: Literal["wk", "ps"] = "wk"
    window: int = 10
    xi: float | None = None

    def __post_init__(self) -> None:
        checks.one_of(self.name, "rule", self.rule, ("wk", "ps"))
        super().__post_init__()

    @property
    def weight(self) -> float:
        return XI[self.rule] if self.xi is None else self.xi

    def init(self, layout: Layout) -> LazyState:
        return self.new_state(layout, movement=self.rule == "ps")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: LazyState, ch: Channel) -> None:
        step = LazyStep(self, x, state, ch)
        change = step.change if self.rule == "wk" else self._change_by_movement(state, ch.context)
        skip = not ch.context.has_gradient or rules.skips(change, step.bound(self.weight))
        uploaders = await step.exchange_flags(skip)
        mean = await step.mean_of_uploads(uploaders)
        if await step.commit(mean) and self.rule == "ps":
            self._follow(step, state, mean * ch.context.lr)
        out.copy_(mean)

    def _change_by_movement(self, state: LazyState, context: StepContext) -> float:
        smoothness, moved = Counts.of(state.counts).smoothness, squared_norm(state.moved) / context.scale**2
        return rules.change_by_movement(smoothness, moved) if smoothness else math.inf

    def wants_gradient(self, state: LazyState, context: StepContext) -> bool:
        if self.rule == "wk":
            return True
        bound = rules.bound(self.weight, float(state.steps.sum()), context.lr)
        return not rules.skips(self._change_by_movement(state, context), bound)

    def _follow(self, step: LazyStep, state: LazyState, movement: torch.Tensor) -> None:
        """Estimate L_i at an upload, and track how far the parameters have moved since."""
        if step.uploads:
            distance = step.squared_norm(state.moved)
            if distance and not step.restarts:
                smoothness = max(step.counts.smoothness, math.sqrt(step.change / distance))
                Counts.of(state.counts)._replace(smoothness=smoothness).write(state.counts)
            state.moved.zero_()
        state.moved += movement

    def exact(self) -> Exchange:
        return replace(self, xi=0.0)
