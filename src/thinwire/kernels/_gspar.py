"""GSpar's greedy iteration on lambda: p = min(lambda |g|, 1) keeps this shape in every round."""

from collections.abc import Callable

# Lambda is used as a float32; tensors of subnormal numbers would ask for a larger one.
LARGEST = 3.4028234663852886e38
_MOST_ROUNDS = 64

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
    lam = min(wanted / total, LARGEST)
    for _ in range(rounds):
        below, mass = tail(lam)
        if mass == 0.0:
            break
        correction = (wanted - numel + below) / (lam * mass)
        if correction <= 1.0:
            break
        lam = min(lam * correction, LARGEST)
    return lam


def closed_form(epsilon: float, tail: Callable[[float | None], tuple[float, float]]) -> float:
    """The smallest lambda with sum x^2 / p <= (1 + epsilon) sum x^2, without sorting.

    `tail(lam)` gives the sums of |x| and of x^2 over the finite entries with lam |x| < 1. Leaving entries
    with lam |x| >= 1 out of the tail can only raise lambda, so the tails shrink until they no longer change:
    at the lambda that the sorted form finds.
    """
    first, second = tail(None)
    everything = second
    if first == 0.0 or everything == 0.0:
        return 0.0
    lam = min(first / (epsilon * everything + second), LARGEST)
    for _ in range(_MOST_ROUNDS):
        first, second = tail(lam)
        if first == 0.0:
            break
        better = min(first / (epsilon * everything + second), LARGEST)
        if not better > lam:
            break
        lam = better
    return lam
