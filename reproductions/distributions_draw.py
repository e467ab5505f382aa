"""Samples of a distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def draw(p: F64, n: int, seed: int) -> I64:
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(p)
    return np.minimum(np.searchsorted(cumulative, rng.random(n), side="right"), len(p) - 1)
