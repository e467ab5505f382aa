"""Kernels are compiled once, before tests with timeouts begin."""

import pytest

from thinwire import kernels


@pytest.fixture(scope="session", autouse=True)
def server_kernels() -> None:
    kernels.prepare(None, ("grid", "linear", "indices", "gspar"))
