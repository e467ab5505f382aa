"""`python -m reproductions asylpg`: its arithmetic. Its smoke run is in tests/reproduce/test_smoke.py."""

import numpy as np
import pytest
from scipy.optimize import minimize

from reproductions import asylpg, asylpg_runs


def test_bits_are_interpolated_along_the_trace():
    run = asylpg_runs.History([0, 50, 100], [1.0, 1e-2, 1e-4], [0, 10, 30], [0, 10, 30], [0, 100, 300])
    assert run.bits_to(1e-2, 0.0) == pytest.approx(20)
    assert run.bits_to(1e-3, 0.0) == pytest.approx(40), "halfway on the scale of logarithms"
    assert run.bytes_to(1e-1, 0.0) == pytest.approx(50)
    assert run.updates_to(1e-4, 0.0) == pytest.approx(100)
    assert run.bits_to(2.0, 0.0) == 0
    assert run.bits_to(1e-5, 0.0) is None
    assert run.bits_to(1e-4, 1e-4) == 60, "the least objective itself"
    assert asylpg.ratio(80, run.bits_to(1e-3, 0.0)) == pytest.approx(2)
    assert asylpg.ratio(22, None) is None


def test_bits_per_entry_are_those_of_whole_epochs():
    run = asylpg_runs.History([0, 5, 10, 15, 20], [1.0] * 5, [0, 70, 100, 200, 300], [0, 10, 50, 60, 90])
    assert run.bits_per_entry(2, 10) == [(5.0, 2.5), (10.0, 2.0)]


def test_the_least_objective_is_no_larger_than_what_another_solver_finds():
    matrix, labels = asylpg_runs.linear_set(None, "digits")
    least = asylpg_runs.least_objective(matrix, labels)

    def objective(x):
        return np.logaddexp(0.0, -labels * (matrix @ x)).mean() + 0.5 * asylpg_runs.STRENGTH * x @ x

    found = minimize(objective, np.zeros(matrix.shape[1]), method="L-BFGS-B", options={"maxfun": 10**5}).fun
    assert least <= found <= least + 1e-5
