"""The nearest distribution to an estimate."""

from __future__ import annotations

import numpy as np

from thinwire.distributions.partition import F64


def onto_simplex(values: F64) -> F64:
    """The distribution nearest to `values` in l2: max(values - tau, 0), with tau such that it sums to 1.

    Never farther from any distribution than `values` itself. Costs a sort.
    """
    descending = np.sort(values)[::-1]
    excess = np.cumsum(descending) - 1.0
    last = int(np.flatnonzero(descending * np.arange(1, len(values) + 1) > excess)[-1])
    return np.maximum(values - excess[last] / (last + 1), 0.0)
