"""Small problems with a known optimum, importable by worker processes."""

import time
from dataclasses import dataclass

import torch

from thinwire.convex import Objective


@dataclass(frozen=True)
class Squares:
    """0.5 |A theta - b|^2; `nap` seconds of sleep in every gradient."""

    a: torch.Tensor
    b: torch.Tensor
    nap: float = 0.0

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.a @ theta - self.b).square().sum()

    def gradient(self, theta: torch.Tensor) -> torch.Tensor:
        time.sleep(self.nap)
        return self.a.T @ (self.a @ theta - self.b)


@dataclass(frozen=True)
class Problem:
    shares: list[Squares]

    @property
    def objectives(self) -> list[Objective]:
        return [Objective(share.loss, share.gradient) for share in self.shares]

    @property
    def smoothness(self) -> tuple[float, ...]:
        return tuple(float(torch.linalg.eigvalsh(share.a.T @ share.a)[-1]) for share in self.shares)

    @property
    def step(self) -> float:
        return 1.0 / float(torch.linalg.eigvalsh(sum(share.a.T @ share.a for share in self.shares))[-1])

    @property
    def best(self) -> torch.Tensor:
        return torch.linalg.solve(
            sum(share.a.T @ share.a for share in self.shares),
            sum(share.a.T @ share.b for share in self.shares),
        )

    @property
    def optimum(self) -> float:
        return float(sum(share.loss(self.best) for share in self.shares))


def squares(workers: int = 5, n: int = 6, seed: int = 0, spread: float = 3.0) -> Problem:
    """Workers of very different smoothness: what lazy aggregation is made for."""
    rng = torch.Generator().manual_seed(seed)
    shares = []
    for worker in range(workers):
        a = torch.randn(12, n, generator=rng, dtype=torch.float64) * spread ** (worker - workers + 1)
        shares.append(Squares(a, torch.randn(12, generator=rng, dtype=torch.float64)))
    return Problem(shares)
