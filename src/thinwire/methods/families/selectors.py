"""Which coordinates a rank sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch

from thinwire import kernels

Picked = tuple[torch.Tensor, torch.Tensor]


def kept(ratio: float, numel: int) -> int:
    """How many of `numel` coordinates a ratio keeps: at least one, if there is one."""
    return min(numel, max(1, int(ratio * numel)))


class Selector(Protocol):
    """Picks about k entries: ascending int32 indices and float32 values. Non-finite entries are picked."""

    def pick(self, x: torch.Tensor, k: int) -> Picked:
        """Out of x."""
        ...

    def peek(self, residual: torch.Tensor, grad: torch.Tensor, k: int) -> Picked:
        """Out of residual + grad, writing nothing."""
        ...

    def take(self, residual: torch.Tensor, grad: torch.Tensor, k: int, undo: torch.Tensor) -> Picked:
        """residual += grad, and out of it, zeroed there; `undo` (may be `grad`) gets the old residual."""
        ...


class Largest:
    """The k largest magnitudes, exactly."""

    def pick(self, x: torch.Tensor, k: int) -> Picked:
        return kernels.topk(x, k)

    def peek(self, residual: torch.Tensor, grad: torch.Tensor, k: int) -> Picked:
        return kernels.select_feedback_topk(residual, grad, k)

    def take(self, residual: torch.Tensor, grad: torch.Tensor, k: int, undo: torch.Tensor) -> Picked:
        return kernels.feedback_topk(residual, grad, k, undo)


class GaussianTail:
    """About k: what lies beyond the quantile of a normal distribution with the same mean and variance."""

    def pick(self, x: torch.Tensor, k: int) -> Picked:
        return kernels.gaussiank(x, k)

    def peek(self, residual: torch.Tensor, grad: torch.Tensor, k: int) -> Picked:
        return kernels.select_feedback_gaussiank(residual, grad, k)

    def take(self, residual: torch.Tensor, grad: torch.Tensor, k: int, undo: torch.Tensor) -> Picked:
        return kernels.feedback_gaussiank(residual, grad, k, undo)


@dataclass(frozen=True)
class Above:
    """Every magnitude above a fixed value, however many."""

    value: float

    def pick(self, x: torch.Tensor, k: int) -> Picked:
        return kernels.threshold(x, self.value)

    def peek(self, residual: torch.Tensor, grad: torch.Tensor, k: int) -> Picked:
        return kernels.select_feedback_threshold(residual, grad, self.value)

    def take(self, residual: torch.Tensor, grad: torch.Tensor, k: int, undo: torch.Tensor) -> Picked:
        return kernels.feedback_threshold(residual, grad, self.value, undo)


@dataclass(frozen=True)
class AtRandom:
    """k different coordinates, each set equally likely. A non-finite entry anywhere poisons the values.

    With `scaled`, values are multiplied by n/k, so that their expectation is x.
    """

    rng: torch.Generator
    scaled: bool = False

    def pick(self, x: torch.Tensor, k: int) -> Picked:
        indices = random_indices(x.numel(), k, self.rng)
        values = x[indices.long()].float()
        if self.scaled:
            values *= x.numel() / max(k, 1)
        return indices, _poisoned(values, kernels.all_finite(x))

    def peek(self, residual: torch.Tensor, grad: torch.Tensor, k: int) -> Picked:
        indices = random_indices(grad.numel(), k, self.rng)
        where = indices.long()
        finite = kernels.all_finite(grad)
        return indices, _poisoned(residual[where] + grad[where].float(), finite)

    def take(self, residual: torch.Tensor, grad: torch.Tensor, k: int, undo: torch.Tensor) -> Picked:
        indices, values = self.peek(residual, grad, k)
        kernels.feedback_block(residual, grad, 0, 0, undo)
        residual[indices.long()] = 0
        return indices, values


def _poisoned(values: torch.Tensor, finite: bool) -> torch.Tensor:
    """The entry that is not finite may not be among those picked: those then carry the news."""
    return values if finite else values.fill_(torch.nan)


def random_indices(numel: int, k: int, rng: torch.Generator) -> torch.Tensor:
    """k different numbers below numel, ascending, every set equally likely, without touching all of them."""
    device = rng.device
    if 4 * k >= numel:
        drawn = torch.randperm(numel, generator=rng, device=device)[:k]
        return drawn.sort().values.to(torch.int32)
    # Draw with replacement until k are different; then drop surplus ones at random.
    found = torch.empty(0, dtype=torch.int64, device=device)
    while found.numel() < k:
        more = torch.randint(numel, (2 * k + 8,), generator=rng, device=device)
        found = cast(torch.Tensor, torch.cat([found, more]).unique())
    surplus = torch.randperm(found.numel(), generator=rng, device=device)[:k]
    return found[surplus].sort().values.to(torch.int32)
