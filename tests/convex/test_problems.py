"""The papers' problems against autograd and their constants, and the score that predicts LAG's saving."""

from __future__ import annotations

import pytest
import torch

from thinwire import ConfigError
from thinwire.convex import (
    Descent,
    Heterogeneity,
    Objective,
    heterogeneity,
    increasing_smoothness,
    lazy_gd,
    softmax_regression,
    squares,
)


def softmax_data(rows: int = 40, features: int = 30, classes: int = 18) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(rows, features, generator=rng, dtype=torch.float64)
    return x * (x > 0.6), torch.randint(classes, (rows,), generator=rng)


@pytest.mark.parametrize("classes", [2, 10, 16, 18])
def test_softmax_regression_equals_autograd(classes: int) -> None:
    x, y = softmax_data(classes=classes)
    shares = softmax_regression(x, y, workers=4, classes=classes, l2=0.3)
    theta = torch.randn(31 * classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for worker, share in enumerate(shares):
        own = slice(10 * worker, 10 * worker + 10)
        point = theta.clone().requires_grad_()
        matrix = point.view(31, classes)
        loss = torch.nn.functional.cross_entropy(x[own] @ matrix[:-1] + matrix[-1], y[own])
        loss = loss + 0.15 * point.square().sum()
        loss.backward()
        assert share.value(theta) == pytest.approx(loss.item(), rel=1e-12)
        assert point.grad is not None
        assert torch.allclose(share.slope(theta), point.grad, rtol=1e-10, atol=1e-12)


def test_softmax_regression_refuses_what_it_cannot_index() -> None:
    x, y = softmax_data(classes=10)
    with pytest.raises(ConfigError, match="labels must be 0 to 4"):
        softmax_regression(x, y, workers=2, classes=5)
    with pytest.raises(ConfigError, match="a label for each row"):
        softmax_regression(x, y[:-1], workers=2, classes=10)
    with pytest.raises(ConfigError, match="too few"):
        softmax_regression(x, y, workers=41, classes=10)


def test_the_synthetic_problem_has_the_papers_smoothness() -> None:
    shares = increasing_smoothness(5, 20)
    found = heterogeneity(squares(shares), torch.zeros(20))
    expected = [(1.3**m + 1) ** 2 for m in range(5)]
    assert found.workers == pytest.approx(expected, rel=1e-6)
    whole = sum(share.x.T @ share.x for share in shares)
    assert found.total == pytest.approx(float(torch.linalg.eigvalsh(whole)[-1]), rel=1e-3)


def test_the_score_bounds_what_lag_uploads() -> None:
    shares = increasing_smoothness(9, 20)
    objectives = squares(shares)
    found = heterogeneity(objectives, torch.zeros(20))
    promised = found.uploads(xi=1.0)
    assert promised < 1
    how = Descent("lag-ps", 1 / found.total, smoothness=found.workers)
    trace = lazy_gd(objectives, torch.zeros(20), how, iterations=200)
    first = 9  # all upload in the first iteration
    assert trace.last.uploads - first <= promised * 200 * 9
    equal = Heterogeneity((4.0,) * 9, 36.0)
    assert equal.uploads(xi=0.1) == 1.0
    assert equal.score(0.01) == 0.0
    assert equal.score(0.02) == 1.0


def counted(objectives: list[Objective]) -> tuple[list[Objective], list[int]]:
    calls = [0] * len(objectives)

    def watch(number: int, one: Objective) -> Objective:
        def gradient(theta: torch.Tensor) -> torch.Tensor:
            calls[number] += 1
            return one.slope(theta)

        return Objective(one.loss, gradient)

    return [watch(number, one) for number, one in enumerate(objectives)], calls


@pytest.mark.parametrize("by", ["loop", "lockstep"])
def test_cyclic_iag_asks_one_worker_after_the_other(by: str) -> None:
    objectives, calls = counted(squares(increasing_smoothness(4, 10)))
    trace = lazy_gd(objectives, torch.zeros(10), Descent("iag-cyclic", 1e-3), iterations=9, by=by)
    assert trace.iterations[0].uploaders == (0, 1, 2, 3)
    assert [one.uploaders for one in trace.iterations[1:5]] == [(1,), (2,), (3,), (0,)]
    assert calls == [3, 3, 3, 3]
    assert trace.last.gradients == trace.last.uploads == 12


def test_random_iag_asks_by_smoothness_and_repeats_itself() -> None:
    shares = increasing_smoothness(4, 10)
    objectives, calls = counted(squares(shares))
    how = Descent("iag-random", 1e-4, smoothness=(1.0, 1.0, 1.0, 7.0))
    start = torch.zeros(10, dtype=torch.float64)
    loop = lazy_gd(objectives, start, how, iterations=400)
    assert 220 < calls[3] < 340
    lockstep = lazy_gd(squares(shares), start, how, iterations=400, by="lockstep")
    assert torch.equal(loop.theta, lockstep.theta)
    with pytest.raises(ConfigError, match="iag-random needs smoothness"):
        lazy_gd(objectives, start, Descent("iag-random", 1e-4), iterations=1)


@pytest.mark.parametrize("algorithm", ["iag-cyclic", "iag-random"])
def test_iag_comes_to_the_optimum(algorithm: str) -> None:
    shares = increasing_smoothness(4, 10)
    objectives = squares(shares)
    whole = sum(share.x.T @ share.x for share in shares)
    best = torch.linalg.solve(whole, sum(share.x.T @ share.y for share in shares))
    step = 1 / (4 * float(torch.linalg.eigvalsh(whole)[-1]))
    how = Descent(algorithm, step, smoothness=tuple((1.3**m + 1) ** 2 for m in range(4)))
    trace = lazy_gd(objectives, torch.zeros(10), how, iterations=3000)
    assert (trace.theta - best).norm() < 1e-6 * best.norm()


def test_the_loss_comes_with_the_gradient() -> None:
    seen = {"loss": 0, "both": 0}

    def loss(theta: torch.Tensor) -> torch.Tensor:
        seen["loss"] += 1
        return theta.square().sum()

    def both(theta: torch.Tensor) -> tuple[float, torch.Tensor]:
        seen["both"] += 1
        return float(theta.square().sum()), 2 * theta

    trace = lazy_gd([Objective(loss, None, both)] * 2, torch.ones(3), Descent("gd", 0.1), iterations=5)
    assert seen == {"loss": 0, "both": 10}
    assert trace.iterations[0].loss == 6.0
