"""The runs behind `python -m reproductions asylpg`: a server and workers as processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.net.launch import Worker, run_local

# The first ones have as many bits as the rule for mu = 0.5 asks for; the last three as few as still converge.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "full precision": {"bits_up": 32, "bits_down": 32},
    "AsyLPG, paper mode": {"mode": "paper"},
    "AsyLPG, centered": {"mode": "centered"},
    "Sparse-AsyLPG, centered": {"mode": "centered", "variant": "sparse"},
    "accelerated AsyLPG, centered": {"mode": "centered", "variant": "accelerated", "theta_floor": 0.9},
    "AsyLPG, centered, 3 bits": {"mode": "centered", "bits_down": 3, "bits_up": 3},
    "Sparse-AsyLPG, centered, 2 bits": {"mode": "centered", "variant": "sparse", "bits_down": 2},
    "accelerated AsyLPG, centered, 3 bits": {
        "mode": "centered",
        "variant": "accelerated",
        "theta_floor": 0.9,
        "bits_down": 3,
        "bits_up": 3,
    },
}
FULL = "full precision"
WORKERS = 4
STRENGTH = 1e-3
# Rows have length 1, so a logistic loss has smoothness L = 1/4. Sparse updates vary more: half the step.
LINEAR: dict[str, Any] = {"epoch_length": 1000, "batch": 16, "prox": "l2", "strength": STRENGTH, "lr": 4.0}
LINEAR_SPARSE: dict[str, Any] = {"lr": 2.0}
NETWORK: dict[str, Any] = {"epoch_length": 200, "batch": 32, "lr": 0.1, "prox": "none"}
NETWORK_SPARSE: dict[str, Any] = {"lr": 0.05}
HIDDEN = (128, 64)

Report = Callable[[str], None]


def linear_runs(
    data: str | None, name: str, epochs: int, algorithms: tuple[str, ...], report: Report | None = None
) -> dict[str, Any]:
    """The least objective, and these algorithms' histories, on one sparse set."""
    found = run_local(
        _linear_job,
        WORKERS + 1,
        data,
        name,
        epochs,
        algorithms,
        timeout=1800.0,
        on_report=lambda rank, text: report(text) if report else None,
    )
    return found[0]


def network_runs(
    data: str | None, rows: int, epochs: int, algorithms: tuple[str, ...], report: Report | None = None
) -> dict[str, Any]:
    """These algorithms' histories and test accuracies with a network of three layers."""
    found = run_local(
        _network_job,
        WORKERS + 1,
        data,
        rows,
        epochs,
        algorithms,
        timeout=1800.0,
        on_report=lambda rank, text: report(text) if report else None,
    )
    return found[0]


def linear_set(data: str | None, name: str) -> tuple[Any, Any]:
    """Rows of length 1 as a CSR matrix, and labels; without data the even digits against the odd."""
    from scipy import sparse

    if data is None:
        from thinwire.tools.workloads.data import digits

        images = digits()
        matrix: Any = sparse.csr_matrix(images.inputs.flatten(1).numpy().astype(np.float64))
        labels = np.where(images.targets.numpy() % 2 == 0, 1.0, -1.0)
    else:
        from thinwire.tools.workloads.data import svmlight

        matrix, labels = svmlight(Path(data), name)
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1))).ravel()
    return sparse.csr_matrix(sparse.diags_array(1.0 / np.maximum(lengths, 1e-12)) @ matrix), labels


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


def _linear_job(
    worker: Worker, data: str | None, name: str, epochs: int, algorithms: tuple[str, ...]
) -> dict[str, Any] | None:
    from thinwire.server import LinearProblem, asylpg

    matrix, labels = linear_set(data, name)
    problem = LinearProblem(matrix, labels)
    runs: dict[str, Any] = {}
    for number, label in enumerate(algorithms):
        chosen = ALGORITHMS[label]
        if worker.rank == 0:
            worker.report(f"{name}: {label}")
        options = LINEAR | (LINEAR_SPARSE if chosen.get("variant") == "sparse" else {}) | chosen
        result = asylpg(problem, name=f"run{number}", epochs=epochs, progress=False, **options)
        runs[label] = _told(result)
    if worker.rank:
        return None
    return {
        "least": least_objective(matrix, labels),
        "rows": problem.rows,
        "size": problem.size,
        "runs": runs,
    }


def _network_job(
    worker: Worker, data: str | None, rows: int, epochs: int, algorithms: tuple[str, ...]
) -> dict[str, Any] | None:
    from thinwire.server import asylpg
    from thinwire.tools.workloads import build
    from thinwire.tools.workloads.data import digits, mnist
    from thinwire.tools.workloads.models import evaluate
    from thinwire.tools.workloads.models import loss as loss_of

    given = digits() if data is None else mnist(Path(data) / "mnist")
    inputs, targets = given.inputs[:rows], given.targets[:rows]

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(given, model(batch[0]), batch[1])

    runs: dict[str, Any] = {}
    size = 0
    for number, label in enumerate(algorithms):
        chosen = ALGORITHMS[label]
        if worker.rank == 0:
            worker.report(f"{given.name}: {label}")
        model = build("mlp", given, 0, HIDDEN)
        size = sum(p.numel() for p in model.parameters())
        options = NETWORK | (NETWORK_SPARSE if chosen.get("variant") == "sparse" else {}) | chosen
        result = asylpg(
            model, loss, (inputs, targets), name=f"run{number}", epochs=epochs, progress=False, **options
        )
        runs[label] = _told(result) | {"accuracy": evaluate(model, given)[1] if worker.rank == 0 else 0.0}
    return None if worker.rank else {"rows": len(inputs), "size": size, "name": given.name, "runs": runs}


def _told(result: Any) -> dict[str, Any]:
    return {
        "objective": [record.objective for record in result.history],
        "bits_down": [record.bits_down for record in result.history],
        "bits_up": [record.bits_up for record in result.history],
        "wire_bytes": [record.wire_bytes for record in result.history],
        "updates": result.updates,
        "staleness": result.staleness.tolist(),
    }
