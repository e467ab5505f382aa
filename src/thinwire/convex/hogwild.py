"""Asynchronous SGD on a vector in shared memory, with sparsified gradients: GSpar's third experiment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire import kernels
from thinwire.core import checks
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.gspar import GSpar
from thinwire.server.problems import LinearProblem

NAME = "hogwild"


@dataclass(frozen=True)
class HogwildEpoch:
    """The state after an epoch; counts run from the beginning.

    Args:
        number: from 1.
        loss: the mean loss of the rows plus the regulariser.
        writes: coordinates written by all threads.
        seconds: the time of the threads, without that of the losses in between.
    """

    number: int
    loss: float
    writes: int
    seconds: float


@dataclass
class HogwildRun:
    """All epochs and the last parameters."""

    x: NDArray[np.float64]
    epochs: list[HogwildEpoch] = field(default_factory=list[HogwildEpoch])

    @property
    def last(self) -> HogwildEpoch:
        """The last epoch."""
        return self.epochs[-1]


def hogwild(
    problem: LinearProblem,
    *,
    epochs: int,
    rate: float,
    l2: float = 0.0,
    decay: float = 1.0,
    workers: int = 1,
    sparsifier: GSpar | None = None,
    seed: int = 0,
    on_epoch: Callable[[HogwildEpoch], object] | None = None,
) -> HogwildRun:
    """Minimise 1/n sum_i loss(a_i'x, y_i) + l2/2 |x|^2 by SGD with threads that share x, without locks.

        problem = LinearProblem(matrix, labels, "hinge")
        run = hogwild(problem, epochs=10, rate=0.5, l2=1e-4, workers=4, sparsifier=GSpar(ratio=0.1))

    Each thread draws a row, computes its gradient on the columns that the row has, samples the gradient and
    writes what was sampled: x_j -= rate Q(g)_j. The regulariser's share is l2 x_j / (the part of the rows
    that have column j), which is right on average. Fewer writes mean fewer conflicts between threads, and
    more variance. With one worker a run is repeatable; with more, the order of the writes is left to chance.

    Args:
        problem: the rows and the loss: "hinge" (an SVM), "logistic" or "squares".
        epochs: an epoch is as many steps as there are rows, of all threads together.
        rate: the step size of the first epoch.
        l2: the weight of the squared norm.
        decay: the step size of epoch k is rate / (1 + decay (k - 1)).
        workers: the number of threads.
        sparsifier: its `ratio` and `rounds`, or its `budget`, say how a row's gradient is sampled; None
            writes every entry.
        seed: of the rows and the sampling.
        on_epoch: called with each epoch.
    """
    checks.whole(NAME, "epochs", epochs, 1)
    checks.whole(NAME, "workers", workers, 1)
    checks.positive(NAME, "rate", rate)
    checks.not_negative(NAME, "l2", l2)
    checks.not_negative(NAME, "decay", decay)
    _check(problem, sparsifier)
    _, columns, *_ = problem.arrays
    frequency = np.bincount(columns, minlength=problem.size) / problem.rows
    shrink = np.divide(l2, frequency, out=np.zeros(problem.size), where=frequency > 0)
    if rate * float(shrink.max()) > 1:
        raise ConfigError(
            f"{NAME}: rate * l2 = {rate * l2:g} is too large for a column that only "
            f"{float(frequency[frequency > 0].min()):.2g} of the rows have: it must be at most that part"
        )
    kernels.prepare(None, ("linear", "hogwild"))
    run, method = HogwildRun(problem.start()), sparsifier or GSpar(ratio=1.0)
    threads = _Threads(problem, shrink, method, workers, seed)
    seconds, writes = 0.0, 0
    with ThreadPoolExecutor(workers) as pool:
        for number in range(1, epochs + 1):
            begin = time.perf_counter()
            step = rate / (1 + decay * (number - 1))
            tasks = [pool.submit(threads.epoch, worker, number, step, run.x) for worker in range(workers)]
            writes += sum(task.result() for task in tasks)
            seconds += time.perf_counter() - begin
            loss = problem.total(run.x, 0, problem.rows)[0] / problem.rows
            with np.errstate(over="ignore", invalid="ignore"):
                loss += 0.5 * l2 * float(run.x @ run.x)
            one = HogwildEpoch(number, loss, writes, seconds)
            if not math.isfinite(one.loss):
                raise ThinwireError(f"{NAME}: the loss is not finite after epoch {number}: lower the rate")
            run.epochs.append(one)
            if on_epoch is not None:
                on_epoch(one)
    return run


@dataclass(frozen=True)
class _Threads:
    """What all threads know."""

    problem: LinearProblem
    shrink: NDArray[np.float64]
    method: GSpar
    workers: int
    seed: int

    def epoch(self, worker: int, number: int, rate: float, x: NDArray[np.float64]) -> int:
        """One thread's steps of an epoch, on the shared x; returns how many coordinates it wrote."""
        from thinwire.kernels.cpu import hogwild
        from thinwire.kernels.cpu._random import counters

        rows, method = self.problem.rows, self.method
        count = rows * (worker + 1) // self.workers - rows * worker // self.workers
        scratch = np.empty(int(np.diff(self.problem.arrays[0]).max()))
        # A generator of its own for every thread and epoch.
        stream = counters((self.seed << 40) ^ (number << 16) ^ worker, 0)
        sampling = (method.ratio, method.rounds, method.budget or 0.0)
        return hogwild.steps(*self.problem.arrays, self.shrink, rate, *sampling, count, *stream, x, scratch)


def _check(problem: Any, sparsifier: Any) -> None:
    if not isinstance(problem, LinearProblem):
        raise ConfigError(
            f"{NAME}: the problem must be a thinwire.server.LinearProblem, not {type(problem).__name__}"
        )
    if sparsifier is not None and not isinstance(sparsifier, GSpar):
        raise ConfigError(f"{NAME}: sparsifier must be GSpar(...) or None, not {sparsifier!r}")
