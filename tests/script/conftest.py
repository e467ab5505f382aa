"""Kernels are compiled here, once, and not in the workers against the clock of a process group."""

import pytest

from tests.laws.cohort import Cohort


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    for method in ("topk(ratio=0.1)", "qsgd(bits=4)", "dgc"):
        cohort = Cohort(method, 2, {"weight": (40, 40)})
        cohort.average(cohort.inputs(0))
