"""Selection by magnitude: exact top-k and everything above a threshold."""

import math

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import selection as reference


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes: (indices, values), indices ascending int32, values float32.

    NaN ranks above infinity, infinity above everything; among equals the lower index wins. `k` beyond the
    size means all.
    """
    check.flat_float("x", x)
    return dispatch(reference.topk, x, None, check.count(k, x.numel()))


def threshold(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """All entries with |x| > t, and every NaN: (indices, values) as in `topk`."""
    check.flat_float("x", x)
    return dispatch(reference.threshold, x, None, checked_threshold(t))


def checked_threshold(t: float) -> float:
    if math.isnan(t):
        raise ValueError("the threshold is NaN")
    return 0.0 if t == 0 else t  # -0.0 would compare as negative once taken by its bits
