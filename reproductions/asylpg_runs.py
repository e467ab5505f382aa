"""The runs behind `python -m reproductions asylpg`: a server and workers as processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local
from thinwire.tools.workloads.data import find

FULL, DOUBLE = "full precision", "AsyLPG"
GRADIENTS, MODEL = "gradients only", "model only"
# The paper's algorithms with its grid, as many bits down as the rule for mu = 0.5 asks for, and 4 bits up.
PAPER: dict[str, dict[str, Any]] = {
    FULL: {"bits_up": 32, "bits_down": 32},
    DOUBLE: {},
    "Sparse-AsyLPG": {"variant": "sparse"},
    "accelerated AsyLPG": {"variant": "accelerated"},
    GRADIENTS: {"bits_down": 32},
    MODEL: {"bits_up": 32},
}
# Not in the paper: bit centring with as few bits as still converge, and a floor of theta.
OURS: dict[str, dict[str, Any]] = {
    "AsyLPG, centered": {"mode": "centered"},
    "AsyLPG, centered, 3 bits": {"mode": "centered", "bits_down": 3, "bits_up": 3},
    "Sparse-AsyLPG, centered, 2 bits": {"mode": "centered", "variant": "sparse", "bits_down": 2},
    "accelerated AsyLPG, theta at least 0.5": {"variant": "accelerated", "theta_floor": 0.5},
}
ALGORITHMS = PAPER | OURS
WORKERS = 4
GAPS = tuple(10.0**-digits for digits in range(2, 9))
STRENGTH = 1e-3
# Rows have length 1, so a logistic loss has smoothness L = 1/4. Sparse updates vary more: half the step.
LINEAR: dict[str, Any] = {
    "epoch_length": 1000,
    "batch": 16,
    "prox": "l2",
    "strength": STRENGTH,
    "lr": 4.0,
    "trace_every": 25,
}
LINEAR_SPARSE: dict[str, Any] = {"lr": 2.0}
NETWORK: dict[str, Any] = {"epoch_length": 200, "batch": 32, "lr": 0.1, "prox": "none", "trace_every": 40}
NETWORK_SPARSE: dict[str, Any] = {"lr": 0.05}
HIDDEN = (128, 64)


@dataclass(frozen=True)
class Study:
    """What the algorithms are run on: a sparse set, or the first `rows` images for a network."""

    name: str
    epochs: int
    algorithms: tuple[str, ...]
    rows: int = 0
    max_staleness: int = 16
    data: Path | None = field(default=None, repr=False)


class History(msgspec.Struct):
    """One algorithm's run along its trace: bits of all workers, bytes with headers and control."""

    updates: Sequence[int]
    objective: Sequence[float]
    bits_down: Sequence[int]
    bits_up: Sequence[int]
    wire_bytes: Sequence[int] = ()
    staleness: Sequence[int] = ()
    accuracy: float = 0.0

    @property
    def bits(self) -> list[int]:
        """Both ways."""
        return [down + up for down, up in zip(self.bits_down, self.bits_up, strict=True)]

    def bits_to(self, gap: float, least: float) -> float | None:
        """Sent both ways by all until the objective was first within `gap` of the least."""
        return self._until(gap, least, self.bits)

    def bytes_to(self, gap: float, least: float) -> float | None:
        """The same on the wire."""
        return self._until(gap, least, self.wire_bytes)

    def updates_to(self, gap: float, least: float) -> float | None:
        """How many updates that took."""
        return self._until(gap, least, self.updates)

    def _until(self, gap: float, least: float, amounts: Sequence[int]) -> float | None:
        """Between two points of the trace the logarithm of the gap is taken to be linear."""
        gaps = [value - least for value in self.objective]
        found = next((number for number, value in enumerate(gaps) if value <= gap), None)
        if found is None:
            return None
        if found == 0 or gaps[found] <= 0.0:
            return float(amounts[found])
        before, after = gaps[found - 1], gaps[found]
        part = math.log(before / gap) / math.log(before / after)
        return amounts[found - 1] + part * (amounts[found] - amounts[found - 1])

    def bits_per_entry(self, size: int, updates: int) -> list[tuple[float, float]]:
        """Down and up, of one update, by epoch; what an epoch begins with is spread over its updates."""
        ends = [number for number, done in enumerate(self.updates) if done % updates == 0]
        return [
            (
                (self.bits_down[after] - self.bits_down[before]) / size / updates,
                (self.bits_up[after] - self.bits_up[before]) / size / updates,
            )
            for before, after in itertools.pairwise(ends)
        ]

    def thinned(self, least: float, updates: int) -> History:
        """Every eighth point, the ends of epochs, and those around each gap that is first reached."""
        gaps = [value - least for value in self.objective]
        crossed = (next((n for n, value in enumerate(gaps) if value <= gap), 0) for gap in GAPS)
        kept = {each for n in crossed for each in (max(0, n - 1), n)} | {len(gaps) - 1}
        kept |= {n for n, done in enumerate(self.updates) if n % 8 == 0 or done % updates == 0}

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[n] for n in sorted(kept)]

        return History(
            some(self.updates),
            some(self.objective),
            some(self.bits_down),
            some(self.bits_up),
            some(self.wire_bytes),
            self.staleness,
            self.accuracy,
        )


class Runs(msgspec.Struct):
    name: str
    rows: int
    size: int
    histories: dict[str, History]
    least: float = 0.0
    """The least objective, where it is known."""


def measure(study: Study) -> Runs:
    """The algorithms' histories on a sparse set, or with a network of three layers."""
    found = run_local(
        _network_job if study.rows else _linear_job,
        WORKERS + 1,
        study,
        timeout=1800.0,
    )
    return found[0]


def linear_set(data: Path | None, name: str) -> tuple[Any, Any]:
    """Rows of length 1 as a CSR matrix, and labels; without data the even digits against the odd."""
    from scipy import sparse

    if data is None:
        from thinwire.tools.workloads.data import digits

        images = digits()
        matrix: Any = sparse.csr_matrix(images.inputs.flatten(1).numpy().astype(np.float64))
        labels = np.where(images.targets.numpy() % 2 == 0, 1.0, -1.0)
    else:
        matrix, labels = svmlight(data, name)
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1))).ravel()
    return sparse.csr_matrix(sparse.diags_array(1.0 / np.maximum(lengths, 1e-12)) @ matrix), labels


def svmlight(data: Path, name: str) -> tuple[Any, Any]:
    """A sparse set of the LIBSVM collection: a CSR matrix, and labels of -1 and +1."""
    from sklearn import datasets

    path = find(data / "libsvm", name)
    matrix, labels = cast(Any, datasets).load_svmlight_file(str(path))
    if len(np.unique(labels)) != 2:
        raise ConfigError(f"{path}: labels of two classes are needed")
    return matrix.tocsr(), np.where(labels == labels.max(), 1.0, -1.0)


def least_objective(matrix: Any, labels: Any) -> float:
    """By Newton's method, whose steps are found by conjugate gradients."""
    from scipy.sparse import linalg

    solvers: Any = linalg
    rows, size = matrix.shape
    x: Any = np.zeros(size)
    for _ in range(50):
        wrong: Any = 1.0 / (1.0 + np.exp(labels * (matrix @ x)))
        gradient = STRENGTH * x - matrix.T @ (labels * wrong) / rows
        if float(np.abs(gradient).max()) < 1e-13:
            break
        curvature = wrong * (1.0 - wrong) / rows

        def product(v: Any, curvature: Any = curvature) -> Any:
            return matrix.T @ (curvature * (matrix @ v)) + STRENGTH * v

        hessian = solvers.LinearOperator((size, size), matvec=product)
        x = x - solvers.cg(hessian, gradient, rtol=1e-10, maxiter=5000)[0]
    losses = np.logaddexp(0.0, -labels * (matrix @ x))
    return float(losses.mean() + 0.5 * STRENGTH * np.dot(x, x))


def _linear_job(worker: Worker, study: Study) -> Runs | None:
    from thinwire.server import LinearProblem, asylpg

    matrix, labels = linear_set(study.data, study.name)
    problem = LinearProblem(matrix, labels)

    def run(options: dict[str, Any]) -> History:
        return _history(asylpg(problem, **options))

    histories = _histories(study, LINEAR, LINEAR_SPARSE, run)
    if worker.rank:
        return None
    least = least_objective(matrix, labels)
    thinned = {label: one.thinned(least, LINEAR["epoch_length"]) for label, one in histories.items()}
    return Runs(study.name, problem.rows, problem.size, thinned, least)


def _network_job(worker: Worker, study: Study) -> Runs | None:
    from thinwire.server import asylpg
    from thinwire.tools.workloads import build
    from thinwire.tools.workloads.data import digits, mnist
    from thinwire.tools.workloads.models import evaluate
    from thinwire.tools.workloads.models import loss as loss_of

    given = digits() if study.data is None else mnist(study.data / "mnist")
    rows = given.inputs[: study.rows], given.targets[: study.rows]
    size = sum(p.numel() for p in build("mlp", given, 0, HIDDEN).parameters())

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(given, model(batch[0]), batch[1])

    def run(options: dict[str, Any]) -> History:
        model = build("mlp", given, 0, HIDDEN)
        history = _history(asylpg(model, loss, rows, **options))
        history.accuracy = evaluate(model, given)[1] if worker.rank == 0 else 0.0
        return history

    histories = _histories(study, NETWORK, NETWORK_SPARSE, run)
    return None if worker.rank else Runs(given.name, len(rows[0]), size, histories)


def _histories(
    study: Study,
    base: dict[str, Any],
    sparse: dict[str, Any],
    run: Callable[[dict[str, Any]], History],
) -> dict[str, History]:
    found: dict[str, History] = {}
    for number, label in enumerate(study.algorithms):
        chosen = ALGORITHMS[label]
        common = {"name": f"run{number}", "epochs": study.epochs, "max_staleness": study.max_staleness}
        found[label] = run(
            {"progress": False}
            | common
            | base
            | (sparse if chosen.get("variant") == "sparse" else {})
            | chosen
        )
    return found


def _history(result: Any) -> History:
    points = result.trace
    return History(
        [point.updates for point in points],
        [point.objective for point in points],
        [point.bits_down for point in points],
        [point.bits_up for point in points],
        [point.wire_bytes for point in points],
        result.staleness.tolist(),
    )
