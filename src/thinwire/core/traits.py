"""What a method guarantees and what it asks for. Hosts, drivers and tests decide by these, never by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["tensor", "bucket", "model"]
PayloadSize = Literal["fixed", "alternating", "data-dependent"]
OptimizerNeeds = Literal["any", "no momentum", "plain SGD"]


@dataclass(frozen=True)
class Traits:
    """The guarantees of a method.

    - consensus: all ranks get the same result, bit for bit
    - unbiased: the expectation of the output is the mean of the inputs
    - conserves: nothing is lost, what is not sent comes back later
      (sum of inputs + old residuals = size x output + new residuals)
    - elementwise: every output coordinate depends on that coordinate only; tensors may be glued together,
      and a non-finite input comes out non-finite by itself
    - single_mean: one mean, no state and no randomness, so there is nothing to commit or to wait for
    - payload: "fixed" if every rank hands over the same number of bytes in every step; "alternating" if
      ranks or steps take turns, so that `payload_bytes` is the most that a rank and a step need;
      "data-dependent" if the length depends on the gradients
    - optimizer: what the method asks of the optimizer behind it: "any", "no momentum" (the method has its
      own), or "plain SGD" (its rule assumes steps of the learning rate times the output)
    - scope: what one run extends over
    """

    consensus: bool = True
    unbiased: bool = False
    conserves: bool = False
    elementwise: bool = False
    single_mean: bool = False
    payload: PayloadSize = "fixed"
    optimizer: OptimizerNeeds = "any"
    scope: Scope = "tensor"

    @property
    def exact_mean(self) -> bool:
        """Whether the output is the mean of the inputs itself: no state, and yet nothing is lost."""
        return self.single_mean and self.conserves
