"""Imported by the server from which the tests' workers are forked: what they would load one by one."""

import tests.hosts.common
import tests.laws.cohort  # noqa: F401  (both: pytest comes along)
import thinwire.tools.script.worker  # noqa: F401
from thinwire import kernels

kernels.prepare()
