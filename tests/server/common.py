"""A small logistic regression, and runs of it on the virtual clock."""

import numpy as np
from scipy.sparse import csr_matrix

from tests.server.simulation import Simulation
from thinwire.server import AsyLPG, LinearProblem
from thinwire.server.options import Agreement
from thinwire.server.server import Server
from thinwire.server.worker import Worker

ROWS, SIZE, STRENGTH = 600, 40, 1e-2
EASY = {"epochs": 10, "epoch_length": 500, "batch": 4, "prox": "l2", "strength": STRENGTH, "lr": 1.0}


def matrix() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(ROWS, SIZE)) * (rng.random((ROWS, SIZE)) < 0.3)
    a /= np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-9)
    y = np.where(a @ rng.normal(size=SIZE) + 0.3 * rng.normal(size=ROWS) > 0, 1.0, -1.0)
    return a, y


def problem() -> LinearProblem:
    a, y = matrix()
    return LinearProblem(csr_matrix(a), y)


def optimum() -> float:
    """The least objective, by Newton's method."""
    a, y = matrix()
    x = np.zeros(SIZE)
    for _ in range(30):
        s = 1 / (1 + np.exp(y * (a @ x)))
        gradient = -(a.T @ (y * s)) / ROWS + STRENGTH * x
        hessian = (a.T * (s * (1 - s))) @ a / ROWS + STRENGTH * np.eye(SIZE)
        x -= np.linalg.solve(hessian, gradient)
    return float(np.log1p(np.exp(-y * (a @ x))).mean() + 0.5 * STRENGTH * x @ x)


def uneven(seed: int = 1):
    """Workers of different speeds, each as irregular as can be."""
    rng = np.random.default_rng(seed)
    return lambda worker, update: rng.exponential() * (1 + worker)


def cast(workers: int = 4, shards: int = 1, server: dict | None = None, **options):
    """Servers and workers for a run of the easy problem."""
    asked = AsyLPG(**{**EASY, **options})
    given = problem()
    agreement = Agreement(asked, given.size, given.rows, shards, workers)
    servers = [
        Server(agreement, k, given.start()[slice(*agreement.part(k))], workers=workers, **(server or {}))
        for k in range(shards)
    ]
    return servers, [Worker(given, agreement, index) for index in range(workers)]


def run(workers: int = 4, shards: int = 1, **options):
    """The first server's result of a run on the virtual clock."""
    return Simulation(*cast(workers, shards, **options), seconds=uneven()).run()[0]
