"""What a run reports: one line an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from thinwire.net.meter import Meter


@dataclass(frozen=True)
class Iteration:
    """The state of things once the uploads of an iteration have arrived; counts run from the beginning.

    Args:
        number: from 1.
        uploads: uploads so far, of all workers together.
        bits: what they took, as the papers count: payloads of uploads, no headers, flags or downloads.
        gradients: gradients computed so far.
        loss: at the parameters of this iteration, the sum over the workers.
        gap: its distance from `optimum`, if that was given.
        uploaders: who uploaded in this iteration.
        silence: for how many iterations each worker has not uploaded.
    """

    number: int
    uploads: int
    bits: int
    gradients: int
    loss: float
    gap: float | None
    uploaders: tuple[int, ...]
    silence: tuple[int, ...]


@dataclass
class Trace:
    """All iterations, and where they led. `meters` are the ranks' own, where there was a wire."""

    iterations: list[Iteration]
    theta: torch.Tensor
    meters: list[Meter] = field(default_factory=list[Meter])

    @property
    def last(self) -> Iteration:
        return self.iterations[-1]

    def reached(self, gap: float) -> Iteration | None:
        """The first iteration whose loss is closer to the optimum than `gap`."""
        return next((one for one in self.iterations if one.gap is not None and one.gap < gap), None)
