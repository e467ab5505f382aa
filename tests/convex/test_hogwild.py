"""SGD in shared memory: the optimum, fewer writes, unbiased steps, repeatable with one thread."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

from thinwire import ConfigError, ThinwireError
from thinwire.convex import hogwild
from thinwire.methods import GSpar, TopK
from thinwire.server import LinearProblem

L2 = 0.01


def problem(loss: str = "logistic", rows: int = 600, columns: int = 40) -> LinearProblem:
    """Rows with a few entries of very different sizes."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.5)
    matrix = scipy.sparse.csr_matrix(dense * np.where(rng.random(columns) < 0.7, 0.2, 1.0))
    labels = np.sign(matrix @ rng.standard_normal(columns) + 0.5 * rng.standard_normal(rows))
    return LinearProblem(matrix, labels, loss)


def least_loss(task: LinearProblem) -> float:
    """By gradient descent, or subgradients with the 1/(l2 k) steps that hinge needs."""
    x, best = task.start(), np.inf
    for k in range(1, 4001):
        loss, gradient = task.total(x, 0, task.rows)
        best = min(best, loss / task.rows + 0.5 * L2 * float(x @ x))
        x = x - min(0.5, 2 / (L2 * (k + 200))) * (gradient / task.rows + L2 * x)
    return best


@pytest.fixture(scope="module", params=["logistic", "hinge"])
def solved(request: pytest.FixtureRequest) -> tuple[LinearProblem, float]:
    task = problem(request.param)
    return task, least_loss(task)


@pytest.mark.parametrize("sparsifier", [None, GSpar(ratio=0.3), GSpar(budget=1.0)], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_finds_the_optimum(
    solved: tuple[LinearProblem, float], sparsifier: GSpar | None, workers: int
) -> None:
    task, best = solved
    run = hogwild(task, epochs=60, rate=0.3, l2=L2, workers=workers, sparsifier=sparsifier)
    first = task.total(task.start(), 0, task.rows)[0] / task.rows
    assert -1e-4 < run.last.loss - best < 0.03 * (first - best)
    assert [one.number for one in run.epochs] == list(range(1, 61))


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_writes_fall_with_the_ratio(ratio: float) -> None:
    dense = hogwild(problem(), epochs=3, rate=0.1, l2=L2)
    sparse = hogwild(problem(), epochs=3, rate=0.1, l2=L2, sparsifier=GSpar(ratio=ratio, rounds=20))
    assert sparse.last.writes == pytest.approx(ratio * dense.last.writes, rel=0.05)


def test_one_thread_is_repeatable_and_seeds_differ() -> None:
    def run(seed: int) -> np.ndarray:
        return hogwild(problem(), epochs=2, rate=0.1, l2=L2, sparsifier=GSpar(ratio=0.2), seed=seed).x

    assert np.array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_ratio_one_writes_what_none_writes() -> None:
    everything = hogwild(problem(), epochs=2, rate=0.1, l2=L2, sparsifier=GSpar(ratio=1.0))
    assert np.array_equal(everything.x, hogwild(problem(), epochs=2, rate=0.1, l2=L2).x)


@pytest.mark.slow
@pytest.mark.parametrize("sparsifier", [GSpar(ratio=0.2), GSpar(budget=2.0)], ids=str)
def test_a_step_is_unbiased(sparsifier: GSpar) -> None:
    """One row, so one step from zero: x = -rate Q(g)."""
    values = np.random.default_rng(0).standard_normal(30) ** 3
    task = LinearProblem(scipy.sparse.csr_matrix(values[None]), np.ones(1))
    found = np.stack(
        [hogwild(task, epochs=1, rate=1.0, sparsifier=sparsifier, seed=seed).x for seed in range(3000)]
    )
    gradient = -0.5 * values
    jump = np.abs(found[found != 0]).min()  # 1 / lambda: what is sure is larger
    p = np.minimum(np.abs(gradient) / jump, 1)
    deviation = np.abs(gradient) * np.sqrt((1 / p - 1) / 3000)
    assert (np.abs(found.mean(0) + gradient) < 5 * deviation + 8 * jump / 3000 + 1e-12).all()
    second = float((found**2).sum(1).mean() / (gradient**2).sum())
    if sparsifier.budget is not None:
        assert second == pytest.approx(1 + sparsifier.budget, rel=0.1)
    else:
        assert float((found != 0).mean()) == pytest.approx(0.2, rel=0.05)


def test_hinge_gradients_are_those_of_the_loss() -> None:
    task = problem("hinge")
    x = np.random.default_rng(1).standard_normal(task.size)
    _, gradient = task.total(x, 0, task.rows)
    for column in range(3):
        step = np.zeros(task.size)
        step[column] = 1e-7
        rise = task.total(x + step, 0, task.rows)[0] - task.total(x - step, 0, task.rows)[0]
        assert rise / 2e-7 == pytest.approx(gradient[column], rel=1e-3, abs=1e-3)
    with pytest.raises(ConfigError, match="no smoothness"):
        _ = task.smoothness


def test_wrong_input() -> None:
    task = problem()
    for options in ({"workers": 0}, {"epochs": 0}, {"rate": 0.0}, {"l2": -1.0}, {"decay": -1.0}):
        with pytest.raises(ConfigError):
            hogwild(task, **({"epochs": 1, "rate": 0.1} | options))
    with pytest.raises(ConfigError, match="sparsifier must be GSpar"):
        hogwild(task, epochs=1, rate=0.1, sparsifier=TopK())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="LinearProblem"):
        hogwild(None, epochs=1, rate=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="too large for a column"):
        hogwild(task, epochs=1, rate=1.0, l2=1.0)
    with pytest.raises(ConfigError, match="hinge loss needs labels"):
        LinearProblem(scipy.sparse.csr_matrix(np.ones((2, 2))), [0, 1], "hinge")


def test_a_loss_that_explodes_is_an_error() -> None:
    task = LinearProblem(scipy.sparse.csr_matrix(np.full((50, 2), 100.0)), np.ones(50), "squares")
    with pytest.raises(ThinwireError, match="lower the rate"):
        hogwild(task, epochs=20, rate=1.0, decay=0.0)
