"""GSpar: keep entry j with probability p_j = min(lambda |x_j|, 1), divided by p_j when kept.

Every kept entry with p < 1 has the magnitude 1 / lambda, so only its index and sign are sent.
"""

import math

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import gspar as reference
from thinwire.kernels.reference.gspar import LARGEST


def gspar_probabilities(x: Tensor, ratio: float, rounds: int = 2) -> float:
    """Lambda that keeps about `ratio * numel` entries, by the greedy rounds (0 for an all-zero tensor)."""
    check.flat_float("x", x)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}")
    return dispatch(reference.gspar_probabilities, x, ratio, rounds)


def gspar_budget(x: Tensor, epsilon: float) -> float:
    """The smallest lambda with sum x^2 / p <= (1 + epsilon) sum x^2: the closed form."""
    check.flat_float("x", x)
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    return dispatch(reference.gspar_budget, x, epsilon)


def gspar_sample(x: Tensor, lam: float, seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draw once: (indices with p = 1, their values, sampled indices with signs in the top bit, 1 / lambda).

    The sampled int32 is the index for a positive entry, and `index | -2**31` (a negative number) for a
    negative one. Non-finite entries are certain. Lambda is used as a float32.
    """
    check.flat_float("x", x)
    if not math.isfinite(lam) or lam < 0:
        raise ValueError(f"lambda must be finite and not negative, got {lam}")
    lam = min(lam, LARGEST)
    certain, values, sampled = dispatch(reference.gspar_sample, x, lam, seed)
    return certain, values, sampled, 1.0 / lam if lam > 0 else 0.0
