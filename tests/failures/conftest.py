"""Settings for the failure tests."""

from tests.hosts.conftest import compiled_kernels

__all__ = ["compiled_kernels"]
