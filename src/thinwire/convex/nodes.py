"""The two parts of lazy gradient descent, whatever runs between them: the workers and the iterate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.convex.options import Descent, Iteration, Known, Objective
from thinwire.errors import ThinwireError
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import BROKEN, FRESH, SKIP, UPLOAD, Upload, squared_norm


class Node:
    """What one worker remembers, and how it decides."""

    def __init__(
        self, objective: Objective, how: Descent, start: torch.Tensor, last: torch.Tensor | None
    ) -> None:
        self.objective = objective
        self.how = how
        self.fresh = last is None
        self.last = torch.zeros_like(start) if last is None else last.double().clone()
        self.silence = 0
        self.error = 0.0
        self._known: tuple[torch.Tensor, float] | None = None

    def compute(self, theta: torch.Tensor) -> Upload:
        """What an upload of the gradient would be."""
        value, slope = self.objective.value_and_slope(theta)
        self._known = None if value is None else (theta, value)
        return self.how.coder.encode(slope, self.last)

    def loss(self, theta: torch.Tensor) -> float:
        """Known already if the gradient at these very parameters brought it along."""
        if self._known is not None and self._known[0] is theta:
            return self._known[1]
        return self.objective.value(theta)

    def flag(self, mine: Upload, bound: float) -> int:
        """Whether to upload, by the worker's rule."""
        if not mine.finite:
            return BROKEN
        if self.fresh:
            return FRESH
        if self.how.algorithm not in ("lag-wk", "laq"):
            return UPLOAD
        # Uploads of "lag-wk" are not coded and have no error.
        allowed = rules.allow_code_errors(bound, mine.error, self.error, rules.LAQ_ERROR_WEIGHT)
        max_skip = self.how.max_skip if self.how.algorithm == "laq" else None
        return SKIP if rules.skips(mine.size, allowed, self.silence, max_skip) else UPLOAD

    def upload(self, mine: Upload) -> torch.Tensor:
        """Remember an upload; returns the difference that it adds to the sum."""
        difference = self.how.coder.decode(mine.parts, self.last.numel())
        self.uploaded(mine, self.last + difference)
        return difference

    def uploaded(self, mine: Upload, last: torch.Tensor) -> None:
        self.last, self.error, self.silence, self.fresh = last, mine.error, 0, False


class Iterate:
    """The parameters, and the sum of all last uploads: equal wherever they are kept."""

    def __init__(self, start: torch.Tensor, how: Descent, workers: int, known: Known | None) -> None:
        self.theta = start.detach().double().clone()
        self.how = how
        self.total = torch.zeros_like(self.theta)
        self.steps: list[float] = []
        self.number = 1
        self.uploads = 0
        self.gradients = 0
        self.silence = [0] * workers
        self._anchors: list[torch.Tensor | None] = [None] * workers
        if known is not None:
            for last in known.last:
                self.total += last.double()
            self.steps = [float(step) for step in known.steps][: how.window]
            if known.anchors:
                self._anchors = [anchor.double() for anchor in known.anchors]

    @property
    def bound(self) -> float:
        return rules.bound(self.how.weight, sum(self.steps), self.how.step * len(self.silence))

    def to_ask(self) -> list[int]:
        """The workers that the server asks in this iteration; in the first one, all.

        LAG-PS: those whose gradients may have changed too much since their last uploads.
        """
        if self.how.algorithm == "lag-ps":
            return [worker for worker, anchor in enumerate(self._anchors) if self._is_far(worker, anchor)]
        new = [worker for worker, anchor in enumerate(self._anchors) if anchor is None]
        if new:
            return new
        if self.how.algorithm == "iag-cyclic":
            return [(self.number - 1) % len(self.silence)]
        rng = torch.Generator().manual_seed(hash_of(self.how.seed, self.number))
        return [int(torch.multinomial(torch.tensor(self.how.smoothness), 1, generator=rng))]

    def _is_far(self, worker: int, anchor: torch.Tensor | None) -> bool:
        if anchor is None or self.how.smoothness is None:
            return True
        distance = squared_norm(self.theta - anchor)
        return not rules.skips(rules.change_by_movement(self.how.smoothness[worker], distance), self.bound)

    def record(
        self, uploaders: Sequence[int], gradients: int, loss: float, optimum: float | None
    ) -> Iteration:
        """Count this iteration's uploads and computed gradients."""
        for worker in uploaders:
            self._anchors[worker] = self.theta
        self.uploads += len(uploaders)
        self.gradients += gradients
        self.silence = [0 if worker in uploaders else n + 1 for worker, n in enumerate(self.silence)]
        bits = 8 * self.how.coder.payload_bytes(self.theta.numel()) * self.uploads
        gap = None if optimum is None else abs(loss - optimum)
        counts = self.number, self.uploads, bits, self.gradients
        return Iteration(*counts, loss, gap, tuple(uploaders), tuple(self.silence))

    def advance(self) -> None:
        before, self.theta = self.theta, self.theta - self.how.step * self.total
        self.steps = [squared_norm(self.theta - before), *self.steps][: self.how.window]
        self.number += 1


def hash_of(seed: int, number: int) -> int:
    """A seed for one iteration, equal wherever it is drawn."""
    return (seed * 0x9E3779B1 + number) % 2**63


def not_finite(number: int, workers: Sequence[int]) -> ThinwireError:
    names = f"worker {', '.join(map(str, workers))}" if workers else "another worker"
    return ThinwireError(f"iteration {number}: the gradient of {names} is not finite: take a smaller step")
