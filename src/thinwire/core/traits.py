"""What a method guarantees and requires. Hosts, drivers and tests decide by traits, never by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["tensor", "bucket", "model"]
PayloadSize = Literal["fixed", "alternating", "data-dependent"]
OptimizerNeeds = Literal["any", "no momentum", "plain SGD", "Adam"]


@dataclass(frozen=True)
class Traits:
    """The guarantees and requirements of a method.

    - consensus: all ranks get the same result, bit for bit
    - unbiased: the expectation of the output is the mean of the inputs
    - conserves: nothing is lost; the part that is not sent comes later
      (sum of inputs + old residuals = size x output + new residuals)
    - elementwise: every output coordinate depends on that coordinate only, so tensors may be concatenated,
      and a non-finite input gives a non-finite output
    - single_mean: one mean, no state and no randomness, so there is nothing to commit or to wait for
    - payload: "fixed" if every rank sends the same number of bytes in every step; "alternating" if ranks or
      steps take turns, so that `payload_bytes` is the largest over ranks and steps; "data-dependent" if the
      length depends on the gradients
    - optimizer: what the method requires of the optimizer: "any", "no momentum" (the method has its own),
      "plain SGD" (its rule assumes steps of the learning rate times the output), or "Adam" (it averages
      Adam's momentum, and the session takes the steps: `sessions/frozen_adam.py`)
    - scope: what one run covers: a tensor, a bucket or the whole model
    - scatters: has `reduce_scatter`, with which every rank gets only its own stretch of the mean; no state
    - second_gradient: needs the gradient of a batch at older parameters as well (`Session.same_batch`)
    - two_levels: an exact mean inside a host, and an exchange between hosts (`Exchange.levels`)
    - delayed: a step gets the mean of the step before it (`core/delay.py`)
    """

    consensus: bool = True
    unbiased: bool = False
    conserves: bool = False
    elementwise: bool = False
    single_mean: bool = False
    payload: PayloadSize = "fixed"
    optimizer: OptimizerNeeds = "any"
    scope: Scope = "tensor"
    scatters: bool = False
    second_gradient: bool = False
    two_levels: bool = False
    delayed: bool = False

    @property
    def exact_mean(self) -> bool:
        """Whether the output is exactly the mean of the inputs: no state, and nothing is lost."""
        return self.single_mean and self.conserves
