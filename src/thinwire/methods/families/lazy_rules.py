"""The rules of lazy aggregation as pure functions: when a worker may skip its upload.

A worker skips if what has changed since its last upload is small compared with the last steps. In squared
norms, with R from `bound`:

    LAG-WK  |g(now) - g(last upload)|^2                          <= R
    LAG-PS  L^2 |theta(now) - theta(last upload)|^2              <= R
    LAQ     |Q(now) - Q(last upload)|^2                          <= R + 3 (|e(now)|^2 + |e(last upload)|^2)
    SLAQ    |Q(now) - Q(last upload)|^2                          <= R + 1.5 (the same) + allowance
    LASG    |g(theta(now); b) - g(theta(last upload); b)|^2      <= R, both on the batch b

g is the gradient, Q what the others have of it, e what its code loses, L the smoothness.
"""

from __future__ import annotations

LAQ_ERROR_WEIGHT = 3.0
SLAQ_ERROR_WEIGHT = 1.5


def bound(xi: float, squared_steps: float, rate: float) -> float:
    """R = xi / rate^2 * squared_steps: the squared lengths of the last steps, added up.

    `rate` is what a step multiplies the compared quantity by. A rate of 0 makes no step, and tells nothing
    about the next one: R is then 0.
    """
    return xi / rate**2 * squared_steps if rate else 0.0


def change_by_movement(smoothness: float, squared_distance: float) -> float:
    """LAG-PS: at most so much has the gradient changed, if the parameters have moved so far."""
    return smoothness**2 * squared_distance


def allow_code_errors(bound: float, error: float, last_error: float, weight: float) -> float:
    """LAQ and SLAQ: what codes lose, now and at the last upload, is no reason to upload."""
    return bound + weight * (error + last_error)


def skips(change: float, allowed: float, silence: int = 0, max_skip: int | None = None) -> bool:
    """Whether a worker that has been silent for `silence` steps skips another upload.

    If nothing is allowed (xi = 0), not even a change of 0 is skipped: that is plain gradient descent.
    """
    if max_skip is not None and silence >= max_skip:
        return False
    return allowed > 0 and change <= allowed
