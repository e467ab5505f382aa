"""Kernels are compiled here, once, and not in the workers against the clock of a process group."""

import pytest

from tests.hosts.common import BUSY, METHODS
from tests.laws.cohort import Cohort


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    for method in dict.fromkeys((*METHODS, *BUSY)):
        cohort = Cohort(method, 2, {"weight": (40, 40)})
        cohort.average(cohort.inputs(0))
