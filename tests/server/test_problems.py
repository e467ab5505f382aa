"""Problems: gradients as by autograd, the same rows and dropout in both, inputs that cannot be used."""

import numpy as np
import pytest
import torch
from scipy.sparse import csc_matrix, csr_matrix
from torch import nn

from tests.server.common import ROWS, SIZE, matrix, problem
from thinwire.errors import ConfigError
from thinwire.server import LinearProblem, ModuleProblem
from thinwire.server.problems import as_problem


def autograd(a: np.ndarray, y: np.ndarray, x: np.ndarray, loss: str) -> tuple[float, np.ndarray]:
    """Sums of losses and gradients."""
    point = torch.tensor(x, requires_grad=True)
    margins = torch.tensor(a) @ point
    labels = torch.tensor(y)
    values = nn.functional.softplus(-labels * margins) if loss == "logistic" else (margins - labels) ** 2 / 2
    values.sum().backward()
    return float(values.detach().sum()), point.grad.numpy()


@pytest.mark.parametrize("loss", ["logistic", "squares"])
def test_linear_gradients_are_those_of_autograd(loss):
    a, y = matrix()
    given = LinearProblem(csr_matrix(a), y, loss)
    rng = np.random.default_rng(0)
    x, snapshot = rng.normal(size=(2, SIZE))
    total, gradient = given.total(x, 50, 250)
    expected = autograd(a[50:250], y[50:250], x, loss)
    assert total == pytest.approx(expected[0], rel=1e-12)
    assert np.allclose(gradient, expected[1], rtol=1e-10, atol=1e-12)
    rows = rng.integers(0, ROWS, 7)
    both = [autograd(a[rows], y[rows], at, loss)[1] / 7 for at in (x, snapshot)]
    assert np.allclose(given.difference(x, snapshot, rows), both[0] - both[1], rtol=1e-9, atol=1e-12)


def test_far_margins_do_not_overflow():
    given = LinearProblem(csr_matrix(np.array([[1.0], [-1.0]])), np.array([1.0, 1.0]))
    loss, gradient = given.total(np.array([5000.0]), 0, 2)
    assert loss == 5000.0
    assert gradient.tolist() == [1.0]


def test_smoothness_is_the_longest_rows():
    a, _ = matrix()
    assert problem().smoothness == pytest.approx(0.25 * (a**2).sum(1).max())


def test_a_module_sees_the_same_rows_and_dropout_twice():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    rows = torch.randn(20, 4)
    given = ModuleProblem(model, lambda m, batch: m(batch).square().mean(), rows)
    x = given.start()
    assert np.abs(given.difference(x, x.copy(), np.arange(5))).max() == 0.0
    moved = x + np.float32(0.1)
    assert np.abs(given.difference(moved, x, np.arange(5))).max() > 0.0


def test_a_dataset_of_examples_is_put_together():
    examples = [(torch.full((3,), float(i)), i) for i in range(6)]
    seen = []

    def loss(model, batch):
        seen.append(batch)
        return model(batch[0]).mean()

    given = ModuleProblem(nn.Linear(3, 1), loss, examples)
    value, gradient = given.total(given.start(), 2, 5)
    assert given.rows == 6
    assert seen[0][1].tolist() == [2, 3, 4]
    assert gradient[:3] == pytest.approx(9.0)  # 2 + 3 + 4
    assert np.isfinite(value)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: LinearProblem(np.zeros((2, 2)), [1, 1]), "CSR"),
        (lambda: LinearProblem(csc_matrix(np.eye(2)), [1, 1]), "tocsr"),
        (lambda: LinearProblem(csr_matrix(np.eye(2)), [1, 1, 1]), "labels"),
        (lambda: LinearProblem(csr_matrix(np.eye(2)), [0, 1]), "-1 and"),
        (lambda: LinearProblem(csr_matrix(np.eye(2)), [1, np.nan]), "finite"),
        (lambda: LinearProblem(csr_matrix(np.eye(2)), [1, 1], "huber"), "loss must be"),
        (lambda: as_problem(nn.Linear(1, 1), None, torch.zeros(3, 1)), "loss="),
        (lambda: as_problem("model", None, None), "must be an nn.Module"),
        (lambda: as_problem(problem(), None, torch.zeros(3)), "its own loss"),
        (lambda: ModuleProblem(nn.ReLU(), lambda m, b: b, torch.zeros(3)), "no trainable"),
        (lambda: ModuleProblem(nn.Linear(1, 1), lambda m, b: b, torch.zeros(0, 1)), "no rows"),
        (
            lambda: ModuleProblem(nn.Linear(1, 1), lambda m, b: b, (torch.zeros(3), torch.zeros(2))),
            "different lengths",
        ),
    ],
)
def test_what_cannot_be_used_is_named(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


def test_damaged_rows_are_refused():
    rows = csr_matrix(np.eye(3))
    rows.indices[1] = 7
    with pytest.raises(ConfigError, match="outside"):
        LinearProblem(rows, [1, 1, 1])
