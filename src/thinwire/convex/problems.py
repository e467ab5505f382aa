"""Convex problems of the papers as objectives, one for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.convex.options import Objective
from thinwire.core import checks
from thinwire.errors import ConfigError
from thinwire.kernels.cpu.linear import softmax_stride, softmax_sum


@dataclass(frozen=True)
class SoftmaxShare:
    """(1/rows) sum of the cross-entropies of some rows, plus l2/2 |theta|^2; rows are kept sparse.

    The parameters are a matrix with a row per feature and a column per class, flat. Loss and gradient come
    from one pass over the entries that are not zero.
    """

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: NDArray[np.float64]
    labels: NDArray[np.int64]
    features: int
    classes: int
    l2: float

    def both(self, theta: torch.Tensor) -> tuple[float, torch.Tensor]:
        matrix = theta.view(self.features, self.classes)
        stride = softmax_stride(self.classes)
        weights = torch.nn.functional.pad(matrix, (0, stride - self.classes))
        sums = torch.zeros_like(weights)
        flat = weights.flatten().numpy(), sums.view(-1).numpy()
        loss = softmax_sum(self.starts, self.columns, self.values, self.labels, self.classes, *flat)
        rows = len(self.labels)
        gradient = sums[:, : self.classes] / rows + self.l2 * matrix
        return loss / rows + 0.5 * self.l2 * float(theta.square().sum()), gradient.flatten()

    def objective(self) -> Objective:
        return Objective(lambda theta: self.both(theta)[0], lambda theta: self.both(theta)[1], self.both)


def softmax_regression(
    features: torch.Tensor, labels: torch.Tensor, *, workers: int, classes: int, l2: float = 0.01
) -> list[Objective]:
    """Softmax regression with an intercept; the rows go to the workers in equal shares, in order.

    f_m(theta) = mean cross-entropy of worker m's rows + l2/2 |theta|^2, theta of (features + 1) * classes.

    Args:
        features: a matrix, a row per sample.
        labels: the class of each row, 0 to classes - 1.
        workers: how many shares; rows that are left over are left out.
        classes: how many.
        l2: the weight of the squared norm in every share.
    """
    name = "softmax_regression"
    checks.whole(name, "workers", workers, 1)
    checks.whole(name, "classes", classes, 2)
    checks.not_negative(name, "l2", l2)
    if features.dim() != 2 or labels.shape != features.shape[:1]:
        shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise ConfigError(f"{name}: features must be a matrix with a label for each row, not {shapes}")
    if len(labels) < workers:
        raise ConfigError(f"{name}: {len(labels)} rows are too few for {workers} workers")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ConfigError(f"{name}: labels must be 0 to {classes - 1}")
    rows = len(labels) // workers
    shares: list[Objective] = []
    for worker in range(workers):
        part = slice(worker * rows, (worker + 1) * rows)
        x = torch.nn.functional.pad(features[part].double(), (0, 1), value=1.0)
        where = x.nonzero()
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = torch.bincount(where[:, 0], minlength=rows).cumsum(0)
        share = SoftmaxShare(
            starts.numpy(),
            where[:, 1].int().numpy(),
            x[where[:, 0], where[:, 1]].numpy(),
            labels[part].long().numpy(),
            x.shape[1],
            classes,
            l2,
        )
        shares.append(share.objective())
    return shares


@dataclass(frozen=True)
class SquaresShare:
    """1/2 |X theta - y|^2."""

    x: torch.Tensor
    y: torch.Tensor

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.x @ theta - self.y).square().sum()

    def gradient(self, theta: torch.Tensor) -> torch.Tensor:
        return self.x.T @ (self.x @ theta - self.y)


def increasing_smoothness(workers: int = 9, n: int = 50, *, seed: int = 0) -> list[SquaresShare]:
    """The synthetic linear regression of the LAG paper: worker m has L_m = (1.3^(m-1) + 1)^2, m = 1, 2, ...

    X_m = 1.3^(m-1) q q' + I with a random unit vector q, and random targets.
    """
    checks.whole("increasing_smoothness", "workers", workers, 1)
    checks.whole("increasing_smoothness", "n", n, 1)
    rng = torch.Generator().manual_seed(seed)
    return [_ridge(1.3**worker, n, rng) for worker in range(workers)]


def _ridge(length: float, n: int, rng: torch.Generator) -> SquaresShare:
    q = torch.randn(n, generator=rng, dtype=torch.float64)
    q = torch.nn.functional.normalize(q, dim=0)
    x = length * torch.outer(q, q) + torch.eye(n, dtype=torch.float64)
    return SquaresShare(x, torch.randn(n, generator=rng, dtype=torch.float64))


def squares(shares: Sequence[SquaresShare]) -> list[Objective]:
    """The shares of a linear regression as objectives."""
    return [Objective(share.loss, share.gradient) for share in shares]
