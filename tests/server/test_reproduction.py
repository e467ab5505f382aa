"""`python -m reproductions asylpg`: its arithmetic, and a smoke run."""

import numpy as np
import pytest
from scipy.optimize import minimize

from reproductions import Context, asylpg, asylpg_runs, find


def test_bits_are_those_of_the_first_snapshot_that_is_good_enough():
    run = {
        "objective": [3.0, 2.0, 1.0],
        "bits_down": [0, 10, 20],
        "bits_up": [0, 1, 2],
        "wire_bytes": [0, 5, 9],
    }
    assert asylpg.bits_to(run, 2.5) == 11
    assert asylpg.bytes_to(run, 1.0) == 9
    assert asylpg.bits_to(run, 0.5) is None
    assert asylpg.ratio(22, asylpg.bits_to(run, 2.5)) == 2.0
    assert asylpg.ratio(22, None) is None


def test_the_least_objective_is_no_larger_than_what_another_solver_finds():
    matrix, labels = asylpg_runs.linear_set(None, "digits")
    least = asylpg_runs.least_objective(matrix, labels)

    def objective(x):
        return np.logaddexp(0.0, -labels * (matrix @ x)).mean() + 0.5 * asylpg_runs.STRENGTH * x @ x

    found = minimize(objective, np.zeros(matrix.shape[1]), method="L-BFGS-B", options={"maxfun": 10**5}).fun
    assert least <= found <= least + 1e-5


@pytest.mark.slow
def test_a_smoke_run_without_data(tmp_path):
    outcome = find("asylpg").run(Context("asylpg", data=None, quick=True, out=tmp_path))
    assert len(outcome.claims) >= 1 + 2 * (len(asylpg.SMOKE) - 1)
    gaps = [float(row[1]) for row in outcome.tables[0].rows]
    assert max(gaps) < 1e-4
