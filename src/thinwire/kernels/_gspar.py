"""GSpar's greedy iteration on lambda: p = min(lambda |g|, 1) keeps this shape in every round."""

import math
from collections.abc import Callable

Tail = Callable[[float | None], tuple[int, float]]


def greedy(numel: int, ratio: float, rounds: int, tail: Tail) -> float:
    """Lambda with sum of p close to ratio * numel.

    `tail(lam)` gives the count and the sum of magnitudes of the finite entries with lam |x| < 1 (all finite
    entries for None). Rounds stop early once the correction is no longer above 1.
    """
    wanted = ratio * numel
    _, total = tail(None)
    if total == 0.0:
        return 0.0
    lam = wanted / total
    for _ in range(rounds):
        below, mass = tail(lam)
        if mass == 0.0:
            break
        correction = (wanted - numel + below) / (lam * mass)
        if correction <= 1.0:
            break
        lam *= correction
    return lam if math.isfinite(lam) else 0.0
