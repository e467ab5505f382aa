"""GSpar in shared memory: threads that write sparsified gradients of an SVM and of logistic regression."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from reproductions.asylpg_runs import linear_set
from reproductions.base import Outcome
from reproductions.parts import Context
from reproductions.seeds import SEEDS, deviation
from thinwire.convex import hogwild
from thinwire.methods import GSpar
from thinwire.server import LinearProblem

LOSSES = {"SVM": "hinge", "logistic": "logistic"}
DENSITIES = (None, 0.3, 0.1)
THREADS = (1, 2, 4)
RATES = (0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Rows:
    """Labelled rows of length 1: "weak features" as in the paper, or a set of the LIBSVM collection."""

    name: str
    rows: int = 0
    columns: int = 0
    data: Path | None = field(default=None, repr=False)

    def make(self) -> tuple[Any, Any]:
        if self.data is not None:
            return linear_set(self.data, self.name)
        from scipy import sparse

        rng = np.random.default_rng(0)
        strength = np.where(rng.random(self.columns) < 0.9, 0.05, 1.0)
        plain = rng.standard_normal((self.rows, self.columns))
        labels = np.sign(plain @ rng.standard_normal(self.columns))
        weak = plain * strength
        return sparse.csr_matrix(weak / np.linalg.norm(weak, axis=1, keepdims=True)), labels


class Run(msgspec.Struct):
    """After each epoch: the loss, the coordinates written so far, the seconds so far. `rate` is the best."""

    rate: float
    losses: list[float]
    writes: list[int]
    seconds: list[float]


def threads(rows: Rows, loss: str, density: float | None, workers: int, epochs: int, seed: int) -> Run:
    """A run with the step size that is best for one thread; the seed is that of the rows' order."""
    matrix, labels = rows.make()
    problem = LinearProblem(matrix, labels, loss)
    sparsifier = None if density is None else GSpar(ratio=density)
    l2 = 1 / (10 * problem.rows)

    def run(rate: float, workers: int) -> Run:
        found = hogwild(
            problem,
            epochs=epochs,
            rate=rate,
            l2=l2,
            decay=0.5,
            workers=workers,
            sparsifier=sparsifier,
            seed=seed,
        ).epochs
        return Run(
            rate, [one.loss for one in found], [one.writes for one in found], [one.seconds for one in found]
        )

    best = min((run(rate, 1) for rate in RATES), key=lambda one: one.losses[-1])
    return best if workers == 1 else run(best.rate, workers)


def label(density: float | None) -> str:
    return "dense" if density is None else f"GSpar {100 * density:.0f} %"


def writes_until(run: Run, loss: float) -> int:
    return next(count for count, reached in zip(run.writes, run.losses, strict=True) if reached <= loss)


def _loss(values: list[float]) -> str:
    return f"{fmean(values):.4f} ± {deviation(values):.4f}"


def add(context: Context, outcome: Outcome) -> None:
    """Run all combinations, and add tables, figures and claims."""
    quick = context.quick
    sets = [Rows("weak features", 300, 64) if quick else Rows("weak features", 4096, 256)]
    if not quick:
        sets.append(Rows("reuters", data=context.data))
    epochs = 5 if quick else 20
    counts, seeds = (THREADS[:2], SEEDS[:1]) if quick else (THREADS, SEEDS)
    runs = context.each(
        {
            (each.name, name, label(density), workers, "seed", seed): partial(
                threads, each, loss, density, workers, epochs, seed
            )
            for each in sets
            for name, loss in LOSSES.items()
            for density in DENSITIES
            for workers in counts
            for seed in seeds
        },
        "threads",
    )
    found: dict[tuple[str, str, str, int], list[Run]] = {}
    for (rows, name, gradient, workers, _, _), run in runs.items():
        found.setdefault((rows, name, gradient, workers), []).append(run)
    outcome.table(
        "threads that share the parameters: loss, coordinates written and seconds after the last epoch",
        {"set": "", "model": "", "gradient": "", "threads": "d", "step size": "", "loss": ""}
        | {"writes": ",.0f", "seconds": ".3f"},
        [
            (
                *key,
                ", ".join(f"{rate:g}" for rate in sorted({run.rate for run in own})),
                _loss([run.losses[-1] for run in own]),
                fmean(run.writes[-1] for run in own),
                fmean(run.seconds[-1] for run in own),
            )
            for key, own in found.items()
        ],
    )
    most = counts[-1]
    for axis in ("writes", "seconds"):
        curves = {
            f"{name}, {label(density)}": (getattr(run, axis), run.losses)
            for name in LOSSES
            for density in DENSITIES
            for run in found[sets[0].name, name, label(density), most][:1]
        }
        title = f"loss against {axis}, {most} threads, {sets[0].name}"
        outcome.figure(title, curves, "coordinates written" if axis == "writes" else axis, "loss", log="x")
    savings: list[float] = []
    for name in LOSSES:
        dense, sparse = (found[sets[0].name, name, label(density), most] for density in (None, 0.1))
        for theirs, own in zip(dense, sparse, strict=True):
            target = max(min(theirs.losses), min(own.losses))
            savings.append(writes_until(theirs, target) / writes_until(own, target))
    outcome.claim(
        "SVM and logistic regression: fewer writes to shared memory for the same loss",
        "curves in the paper",
        f"{min(savings):.1f} to {max(savings):.1f} times fewer at 10 % of the entries, {most} threads, "
        f"{sets[0].name}",
        min(savings) > 1,
    )
    apart = max(
        abs(fmean(run.losses[-1] for run in own) / fmean(run.losses[-1] for run in found[*key[:3], 1]) - 1)
        for key, own in found.items()
    )
    outcome.claim(
        "threads without locks find the same loss as one",
        "curves in the paper",
        f"within {100 * apart:.1f} %",
        apart < 0.05,
    )
    outcome.notes.append(
        "Seconds are those of this machine's cores; with more threads than cores they cannot fall."
    )
