"""For methods that keep the momentum themselves: momentum correction, masking and local clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from thinwire.core import Layout, State, momentum, residual


@dataclass
class Accumulated(State):
    """The sum of momenta that has not been sent, and the momentum (empty if there is none)."""

    v: torch.Tensor = residual()
    u: torch.Tensor = momentum()

    @staticmethod
    def for_layout(layout: Layout, with_momentum: bool) -> Accumulated:
        sizes = layout.numel, layout.numel if with_momentum else 0
        return Accumulated(*(torch.zeros(size, device=layout.device) for size in sizes))


def corrected(
    g: torch.Tensor, m: torch.Tensor, a: float, nesterov: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next momentum, and what this step adds to the model. They differ only with Nesterov.

    `m` may be empty if there is no momentum (a = 0). Both results are then g.
    """
    if not m.numel():
        return g, g
    if nesterov:
        m = (m + g) * a
        return m, m + g
    m = m * a + g
    return m, m


def masked(m: torch.Tensor, new: torch.Tensor, sent: torch.Tensor) -> None:
    """Momentum factor masking: m = new, and 0 at the indices that were sent. `m` may be empty."""
    if m.numel():
        m.copy_(new)
        m[sent.long()] = 0


def clipped(g: torch.Tensor, norm: float) -> torch.Tensor:
    """g, scaled down to this norm if it is longer. Non-finite entries stay non-finite."""
    length = cast(torch.Tensor, torch.linalg.vector_norm(g, dtype=torch.float64))
    if g.device.type != "cpu":  # multiplied by 1 instead of asking
        return g * torch.where(length > norm, norm / length, 1.0)
    return g * (norm / float(length)) if float(length) > norm else g
