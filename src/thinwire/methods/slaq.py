"""SLAQ: LAQ for minibatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core import checks
from thinwire.core.exchange import Exchange
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import UNCODED
from thinwire.methods.laq import QuantisedLazy


@dataclass(frozen=True)
class SLAQ(QuantisedLazy):
    """LAQ with a rule for gradients of minibatches, which never stop changing.

    rank i skips if |Q_i' - Q_i|^2 <= R_k + 1.5 (|e_i|^2 + |e_i(last upload)|^2) + allowance
    with R_k = xi sum_{d=1..D} |out_{k-d}|^2, and has been silent for fewer than `max_skip` steps; all else
    as for `laq`.

    Noise alone makes two gradients of one rank differ, so without an allowance few uploads are skipped, and
    it is the code that saves bits. `lasg` compares on the same batch and does not see that noise.

    Args:
        bits, window, xi, max_skip: as for `laq`.
        allowance: a squared norm below which a difference counts as noise.

    Differences from the paper: a radius for each tensor, as for `laq`; the terms for the variance of a
    gradient are one constant, as in the code.
    """

    name: ClassVar[str] = "slaq"
    formula = "1 + ceil(n * bits / 8) + 4"
    formula_note = "if every rank uploads; a rank that skips sends 1 byte"
    reference = (
        'Sun, Chen, Giannakis, Yang and Yang, "Lazily aggregated quantized gradient innovation for '
        "communication-efficient federated learning\", 2020, and the authors' code (allowance 0.2 there)"
    )
    allowance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_negative(self.name, "allowance", self.allowance)

    def allowed(self, bound: float, error: float, last_error: float) -> float:
        return rules.allow_code_errors(bound, error, last_error, rules.SLAQ_ERROR_WEIGHT) + self.allowance

    def exact(self) -> Exchange:
        return replace(self, bits=UNCODED, xi=0.0, allowance=0.0)
