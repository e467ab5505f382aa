"""`python -m reproductions asylpg`: its arithmetic. Its smoke run is in tests/reproduce/test_smoke.py."""

import numpy as np
from scipy.optimize import minimize

from reproductions import asylpg, asylpg_runs


def test_bits_are_those_of_the_first_snapshot_that_is_good_enough():
    run = asylpg_runs.History([3.0, 2.0, 1.0], [0, 10, 20], [0, 1, 2], [0, 5, 9])
    assert run.epochs_to(2.5) == 1
    assert run.bits_to(2.5) == 11
    assert run.bytes_to(1.0) == 9
    assert run.bits_to(0.5) is None
    assert run.bytes_to(0.5) is None
    assert asylpg.ratio(22, run.bits_to(2.5)) == 2.0
    assert asylpg.ratio(22, None) is None


def test_the_least_objective_is_no_larger_than_what_another_solver_finds():
    matrix, labels = asylpg_runs.linear_set(None, "digits")
    least = asylpg_runs.least_objective(matrix, labels)

    def objective(x):
        return np.logaddexp(0.0, -labels * (matrix @ x)).mean() + 0.5 * asylpg_runs.STRENGTH * x @ x

    found = minimize(objective, np.zeros(matrix.shape[1]), method="L-BFGS-B", options={"maxfun": 10**5}).fun
    assert least <= found <= least + 1e-5
