"""Stochastic gradient steps on a vector that several threads share, each gradient sampled like GSpar's.

Threads read and write single coordinates without locks. A write may be lost if another thread writes the same
coordinate at the same time; fewer writes make that rarer.
"""

import numpy as np

from thinwire.kernels.cpu._jit import F64, I32, kernel
from thinwire.kernels.cpu._random import word
from thinwire.kernels.cpu.linear import HINGE, LOGISTIC, slope

_MOST_ROUNDS = 65
_WORD = 1.0 / 2**32


@kernel
def tail(g: F64, lam: float) -> tuple[int, float, float]:
    """(count, sum of magnitudes, sum of squares) of the entries with lam |g| < 1."""
    count, total, squares = 0, 0.0, 0.0
    for j in range(len(g)):
        size = abs(g[j])
        if size * lam < 1.0:
            count += 1
            total += size
            squares += size * size
    return count, total, squares


@kernel
def by_ratio(g: F64, ratio: float, rounds: int) -> float:
    """Lambda by the greedy rounds, as `reference.gspar.greedy`."""
    wanted = ratio * len(g)
    lam = wanted / tail(g, 0.0)[1]
    for _ in range(rounds):
        below, mass, _ = tail(g, lam)
        if mass == 0.0:
            break
        correction = (wanted - len(g) + below) / (lam * mass)
        if correction <= 1.0:
            break
        lam *= correction
    return lam


@kernel
def by_budget(g: F64, epsilon: float) -> float:
    """Lambda in closed form, as `cpu.gspar.gspar_budget`."""
    _, first, everything = tail(g, 0.0)
    second, lam = everything, 0.0
    for _ in range(_MOST_ROUNDS):
        better = first / (epsilon * everything + second)
        if not better > lam:
            break
        lam = better
        _, first, second = tail(g, lam)
    return lam


@kernel
def steps(
    starts: I32,
    columns: I32,
    values: F64,
    labels: F64,
    kind: int,
    shrink: F64,
    rate: float,
    ratio: float,
    rounds: int,
    epsilon: float,
    count: int,
    counter: np.uint32,
    key: np.uint32,
    x: F64,
    scratch: F64,
) -> int:
    """Take `count` steps x -= rate Q(gradient of a random row); returns how many coordinates were written.

    The gradient has the row's entries only: slope a_j + shrink_j x_j. `epsilon` > 0 is a variance budget;
    if it is 0, `ratio` is the density, and 1 writes every entry.
    """
    written = 0
    for _ in range(count):
        r = int(np.uint64(word(counter, key)) * np.uint64(len(labels)) >> np.uint64(32))
        counter = np.uint32(counter + np.uint32(1))
        begin, end = starts[r], starts[r + 1]
        margin = 0.0
        for e in range(begin, end):
            margin += values[e] * x[columns[e]]
        weight = slope(kind, margin, labels[r])
        g = scratch[: end - begin]
        largest = 0.0
        for e in range(begin, end):
            g[e - begin] = weight * values[e] + shrink[columns[e]] * x[columns[e]]
            largest = max(largest, abs(g[e - begin]))
        if largest == 0.0:
            continue
        everything = ratio >= 1.0 and epsilon == 0.0
        lam = np.inf if everything else by_budget(g, epsilon) if epsilon > 0.0 else by_ratio(g, ratio, rounds)
        for e in range(begin, end):
            entry = g[e - begin]
            if entry == 0.0:
                continue
            if lam * abs(entry) < 1.0:
                u = word(counter, key) * _WORD
                counter = np.uint32(counter + np.uint32(1))
                if u >= lam * abs(entry):
                    continue
                entry = (1.0 if entry > 0 else -1.0) / lam
            x[columns[e]] -= rate * entry
            written += 1
    return written


def warm() -> None:
    starts, columns = np.array([0, 1, 2], np.int32), np.array([0, 1], np.int32)
    ones, zero = np.ones(2), np.uint32(0)
    for kind, epsilon in ((LOGISTIC, 0.0), (HINGE, 1.0)):
        x, scratch = np.zeros(2), np.zeros(1)
        options = (ones, 0.1, 0.5, 2, epsilon, 2, zero, zero)
        steps(starts, columns, ones, ones, kind, *options, x, scratch)
