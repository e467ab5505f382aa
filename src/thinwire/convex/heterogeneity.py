"""How much lazy aggregation can save on given shares, before it is tried.

LAG saves uploads where workers differ: one whose gradient changes slowly (a small L_m) need not upload often.
By the LAG paper a worker with L_m^2 <= xi / (d step^2 M^2) uploads at most once in d + 1 iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.convex.options import Objective
from thinwire.core import checks
from thinwire.errors import ConfigError
from thinwire.methods.families.lazy import squared_norm


@dataclass(frozen=True)
class Heterogeneity:
    """The smoothness of every worker's share, and of their sum.

    Args:
        workers: L_m of each worker.
        total: L of the sum of all shares.
    """

    workers: tuple[float, ...]
    total: float

    def score(self, threshold: float) -> float:
        """h of the paper: the share of the workers with (L_m / L)^2 <= threshold."""
        return sum((own / self.total) ** 2 <= threshold for own in self.workers) / len(self.workers)

    def uploads(self, *, step: float | None = None, xi: float = 0.1, window: int = 10) -> float:
        """At most this part of all uploads is sent by LAG: 1 means that it promises no saving.

        Args:
            step: the step size; None is 1 / L.
            xi: the weight of the last steps in the rule, `window` how many of them count.
        """
        checks.positive("heterogeneity", "xi", xi)
        checks.whole("heterogeneity", "window", window, 1)
        a = 1.0 / self.total if step is None else step
        parts: list[float] = []
        for own in self.workers:
            allowed = xi / (a * len(self.workers) * own) ** 2  # d may be at most this
            parts.append(1.0 / (min(int(allowed), window) + 1))
        return sum(parts) / len(parts)


def heterogeneity(
    objectives: Sequence[Objective], theta: torch.Tensor, *, iterations: int = 50, seed: int = 0
) -> Heterogeneity:
    """Measure the smoothness of each share and of the sum at `theta`, by power iteration on gradients.

        found = heterogeneity(shares, torch.zeros(8))
        found.uploads()        # 0.35: LAG sends at most 35 % of the uploads of gradient descent

    Args:
        objectives: one for each worker.
        theta: where to measure; for quadratic losses it does not matter.
        iterations: of the power method; the result approaches L from below.
        seed: of its first direction.
    """
    if not objectives:
        raise ConfigError("heterogeneity: give one objective for each worker")
    checks.whole("heterogeneity", "iterations", iterations, 1)
    point = theta.detach().double()
    found = [_smoothness([one], point, iterations, seed) for one in objectives]
    return Heterogeneity(tuple(found), _smoothness(objectives, point, iterations, seed))


def _smoothness(objectives: Sequence[Objective], theta: torch.Tensor, iterations: int, seed: int) -> float:
    def slope(at: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(at)
        for one in objectives:
            total += one.slope(at)
        return total

    rng = torch.Generator().manual_seed(seed)
    direction = torch.randn(theta.numel(), generator=rng, dtype=torch.float64)
    direction = torch.nn.functional.normalize(direction, dim=0)
    width = 1e-4 * max(1.0, squared_norm(theta) ** 0.5)
    size = 0.0
    for _ in range(iterations):
        change = (slope(theta + width * direction) - slope(theta - width * direction)) / (2 * width)
        size = squared_norm(change) ** 0.5
        if size == 0.0:
            break
        direction = change / size
    return size
