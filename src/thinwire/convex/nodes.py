"""The parts of lazy gradient descent, whatever runs between them: workers, the iterate, the anchors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.convex.options import Descent, Iteration, Known, Objective
from thinwire.errors import ConfigError, ThinwireError
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

    def compute(self, theta: torch.Tensor) -> tuple[torch.Tensor, Upload]:
        """The gradient, and its upload."""
        gradient = self.objective.slope(theta)
        return gradient, self.how.coder.encode(gradient, self.last)

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
    """The parameters and the sum of all last uploads: equal wherever they are kept."""

    def __init__(self, start: torch.Tensor, how: Descent, workers: int, known: Known | None) -> None:
        self.theta = start.detach().double().clone()
        self.how = how
        self.total = torch.zeros_like(self.theta)
        self.steps: list[float] = []
        self.number = 1
        self.uploads = 0
        self.gradients = 0
        self.silence = [0] * workers
        if known is not None:
            for last in known.last:
                self.total += last.double()
            self.steps = [float(step) for step in known.steps][: how.window]

    @property
    def bound(self) -> float:
        return rules.bound(self.how.weight, sum(self.steps), self.how.step * len(self.silence))

    def record(
        self, uploaders: Sequence[int], gradients: int, loss: float, optimum: float | None
    ) -> Iteration:
        """Count this iteration's uploads and computed gradients."""
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


class Anchors:
    """The parameters at each worker's last upload: what the server of "lag-ps" decides by."""

    def __init__(self, how: Descent, workers: int, known: Known | None) -> None:
        self._smoothness = how.smoothness or ()
        given = () if known is None else known.anchors
        self._anchors: list[torch.Tensor | None] = [tensor.double() for tensor in given] or [None] * workers

    def to_ask(self, theta: torch.Tensor, bound: float) -> list[int]:
        return [worker for worker in range(len(self._anchors)) if self._far(worker, theta, bound)]

    def _far(self, worker: int, theta: torch.Tensor, bound: float) -> bool:
        anchor = self._anchors[worker]
        if anchor is None:
            return True
        change = rules.change_by_movement(self._smoothness[worker], squared_norm(theta - anchor))
        return not rules.skips(change, bound)

    def move(self, workers: Sequence[int], theta: torch.Tensor) -> None:
        for worker in workers:
            self._anchors[worker] = theta


def check(start: torch.Tensor, how: Descent, workers: int, known: Known | None) -> None:
    how.check_workers(workers)
    if start.dim() != 1 or not start.numel() or not start.is_floating_point():
        raise ConfigError(
            f"lazy_gd: start must be a flat tensor of numbers, not of shape {tuple(start.shape)}"
        )
    for what, given in (("last", known.last), ("anchors", known.anchors)) if known is not None else ():
        optional = what == "anchors" and how.algorithm != "lag-ps"
        if len(given) != workers and not optional:
            raise ConfigError(f"lazy_gd: known.{what} needs one tensor for each of {workers} workers")
        if any(tensor.shape != start.shape for tensor in given):
            raise ConfigError(f"lazy_gd: known.{what} must have tensors of shape {tuple(start.shape)}")


def not_finite(number: int, workers: Sequence[int]) -> ThinwireError:
    names = f"worker {', '.join(map(str, workers))}" if workers else "another worker"
    return ThinwireError(f"iteration {number}: the gradient of {names} is not finite: take a smaller step")
