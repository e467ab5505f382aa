"""The rules of lazy aggregation as pure functions: when a worker may skip its upload.

A worker skips its upload if the change since its last upload is small compared with the last steps. In
squared norms, with R from `bound`:

    LAG-WK  |g(now) - g(last upload)|^2                          <= R
    LAG-PS  L^2 |theta(now) - theta(last upload)|^2              <= R
    LAQ     |Q(now) - Q(last upload)|^2                          <= R + 3 (|e(now)|^2 + |e(last upload)|^2)
    SLAQ    |Q(now) - Q(last upload)|^2                          <= R + 1.5 (the same) + allowance
    LASG    |g(theta(now); b) - g(theta(last upload); b)|^2      <= R, both on the batch b

g is the gradient, Q the gradient as the other workers decode it, e what the code loses, L the smoothness.
"""

from __future__ import annotations

LAQ_ERROR_WEIGHT = 3.0
SLAQ_ERROR_WEIGHT = 1.5


def bound(xi: float, squared_steps: float, rate: float) -> float:
    """R = xi / rate^2 * squared_steps, with the sum of the squared lengths of the last steps.

    A step is `rate` times the compared quantity. If the rate is 0 there was no step to compare with, and R
    is 0.
    """
    return xi / rate**2 * squared_steps if rate else 0.0


def change_by_movement(smoothness: float, squared_distance: float) -> float:
    """LAG-PS: the largest change of the gradient if the parameters have moved this far."""
    return smoothness**2 * squared_distance


def allow_code_errors(bound: float, error: float, last_error: float, weight: float) -> float:
    """LAQ and SLAQ: the errors of the codes, now and at the last upload, are no reason to upload."""
    return bound + weight * (error + last_error)


def skips(change: float, allowed: float, silence: int = 0, max_skip: int | None = None) -> bool:
    """Whether a worker that has skipped `silence` uploads in a row skips another one.

    If nothing is allowed (xi = 0), not even a change of 0 is skipped: this is plain gradient descent.
    """
    if max_skip is not None and silence >= max_skip:
        return False
    return allowed > 0 and change <= allowed
