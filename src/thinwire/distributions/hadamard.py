"""The Walsh-Hadamard transform of counts, and powers of two."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.reference.rotation import hadamard


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def fwht(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """H x along the last axis, whose length is a power of two; H[r, c] = (-1)^(bits set in r & c).

    H H = length x identity, so the transform divided by the length undoes it. Costs n log2 n additions.
    """
    size = x.shape[-1]
    if size & (size - 1) or not size:
        raise ValueError(f"the transform needs a power of two, not {size}")
    y = x.copy()
    hadamard(torch.from_numpy(y), size)
    return y
