"""SLAQ: LAQ for minibatches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.core import Exchange, checks
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import UNCODED
from thinwire.methods.laq import QuantisedLazy


@dataclass(frozen=True)
class SLAQ(QuantisedLazy):
    """LAQ with a rule for minibatches, whose gradients never stop changing.

        rank i skips if |Q_i' - Q_i|^2 <= R_k + 1.5 (|e_i|^2 + |e_i(last upload)|^2) + allowance
        and it has skipped fewer than `max_skip` steps;  R_k = xi sum_{d=1..D} |out_{k-d}|^2
        all else as for LAQ; e_i is what the code loses

    Noise alone makes two gradients of one rank differ. Without an allowance few uploads are skipped, and only
    the code saves bytes.

    Args:
        allowance: a squared norm below which a difference counts as noise.

    Differences from the paper: every tensor has its own radius, as for `laq`. The terms for the variance of a
    gradient are one constant, as in the authors' code.
    """

    name = "slaq"
    use_when = """You train with minibatches and plain SGD, and know a squared norm below which changes are
    noise: give it as `allowance`."""
    avoid_when = """You do not know the noise: with an allowance of 0 and 4 bits or more, nothing was skipped
    in the reproduction, and `qsgd(bits=4)` sent less. Never use 1 or 2 bits with skipping."""
    reference = """Sun, Chen, Giannakis, Yang and Yang, "Lazily aggregated quantized gradient innovation for
    communication-efficient federated learning", 2020, and the authors' code (allowance 0.2 there)"""
    allowance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_negative(self.name, "allowance", self.allowance)

    def allowed(self, bound: float, error: float, last_error: float) -> float:
        return rules.allow_code_errors(bound, error, last_error, rules.SLAQ_ERROR_WEIGHT) + self.allowance

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0, allowance=0.0)
