"""SLAQ: LAQ for minibatches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange, Layout, checks
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import UNCODED, Counts, LazyState, LazyStep, squared_norm
from thinwire.methods.laq import QuantisedLazy

NOISE_FACTOR = 1.1
MEMORY = 0.9


@dataclass(frozen=True)
class SLAQ(QuantisedLazy):
    """LAQ with a rule for minibatches, whose gradients never stop changing.

        rank i skips if |Q_i' - Q_i|^2 <= R_k + 1.5 (|e_i|^2 + |e_i(last upload)|^2) + allowance
        and it has skipped fewer than `max_skip` steps;  R_k = xi sum_{d=1..D} |out_{k-d}|^2
        all else as for LAQ; e_i is what the code loses

    Noise alone makes two gradients of one rank differ. The allowance is what noise explains, so an upload is
    skipped as long as the change is hardly more than that:

        allowance = NOISE_FACTOR * v;  v <- 0.9 v + 0.1 |g_k - g_{k-1}|^2

    Args:
        allowance: a squared norm below which a change counts as noise. None measures it, as above.

    Differences from the paper: every tensor has its own radius, as for `laq`. The paper has terms for the
    variance of a gradient, the authors' code a constant (0.2); here the variance is measured.
    """

    name = "slaq"
    enough_bits = 3
    use_when = """You train with large minibatches, plain SGD and a small step, so that a gradient stays
    useful for many steps: most uploads are skipped."""
    avoid_when = """The step is large or the batches are small: a skipped upload repeats the noise of an old
    batch. Never use 1 or 2 bits with skipping. Momentum and Adam are refused."""
    reference = """Sun, Chen, Giannakis, Yang and Yang, "Lazily aggregated quantized gradient innovation for
    communication-efficient federated learning", 2020, and the authors' code (allowance 0.2 there)"""
    allowance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optional(checks.not_negative, self.name, "allowance", self.allowance)

    def init(self, layout: Layout) -> LazyState:
        return self.new_state(layout, anchor=self.allowance is None)

    def allowed(self, step: LazyStep) -> float:
        codes = step.error, step.counts.error, rules.SLAQ_ERROR_WEIGHT
        noise = NOISE_FACTOR * step.counts.noise if self.allowance is None else self.allowance
        return rules.allow_code_errors(step.bound(self.xi), *codes) + noise

    def follow(self, x: torch.Tensor, state: LazyState, ch: Channel) -> None:
        if self.allowance is not None:
            return
        scale, counts = ch.context.scale, Counts.of(state.counts)
        gradient = x.float() if scale == 1 else x.float() / scale
        if counts.uploads > 1 or counts.silence:  # before that there is no last gradient
            squared = squared_norm(state.anchor.sub_(gradient))
            noise = MEMORY * counts.noise + (1 - MEMORY) * squared if counts.noise else squared
            counts._replace(noise=noise).write(state.counts)
        state.anchor.copy_(gradient)

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0, allowance=0.0)
