"""What is minimised: any `nn.Module` with a loss closure, or a linear model on sparse rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire import log
from thinwire.errors import ConfigError

Vector = NDArray[Any]
Rows = NDArray[np.int64]
LossClosure = Callable[[nn.Module, Any], torch.Tensor]

LOSSES = {"logistic": 0, "squares": 1, "hinge": 2}


@runtime_checkable
class Problem(Protocol):
    """f(x) = the mean over `rows` rows of a loss of `size` parameters."""

    @property
    def size(self) -> int:
        """The number of parameters."""
        ...

    @property
    def rows(self) -> int:
        """The number of rows."""
        ...

    @property
    def kernels(self) -> tuple[str, ...]:
        """Families of compiled kernels to be made ready first."""
        ...

    def start(self) -> Vector:
        """The parameters to begin with; their dtype is the one that the server computes in."""
        ...

    def difference(self, x: Vector, snapshot: Vector, rows: Rows) -> Vector:
        """The mean over these rows of the gradient at x minus that at the snapshot."""
        ...

    def total(self, x: Vector, begin: int, end: int) -> tuple[float, Vector]:
        """The sums of losses and of gradients over a range of rows."""
        ...

    def finish(self, x: Vector) -> None:
        """Take the parameters over, at the end."""
        ...


class LinearProblem:
    """A linear model on the rows of a scipy CSR matrix, in float64.

    f(x) = 1/n sum_i loss(a_i'x, y_i). "logistic": log(1 + exp(-y a'x)) with labels -1 and +1; "hinge":
    max(0, 1 - y a'x) with the same labels; "squares": (a'x - y)^2 / 2. A regulariser is the options' proximal
    term, which keeps gradients sparse.
    """

    kernels = ("grid", "linear", "indices", "gspar")

    def __init__(self, matrix: Any, labels: Any, loss: str = "logistic") -> None:
        if not all(hasattr(matrix, name) for name in ("indptr", "indices", "data", "shape")):
            raise ConfigError(
                f"a linear problem needs a scipy CSR matrix (matrix.tocsr()), not {type(matrix).__name__}"
            )
        if getattr(matrix, "format", "csr") != "csr":
            raise ConfigError(f"a linear problem needs CSR rows, not {matrix.format}: call .tocsr()")
        if loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, not {loss!r}")
        n, self._size = (int(length) for length in matrix.shape)
        self._starts = np.ascontiguousarray(matrix.indptr, np.int32)
        self._columns = np.ascontiguousarray(matrix.indices, np.int32)
        self._values = np.ascontiguousarray(matrix.data, np.float64)
        self._labels = np.ascontiguousarray(labels, np.float64)
        self._kind = LOSSES[loss]
        if n < 1 or self._size < 1 or len(self._labels) != n or self._labels.ndim != 1:
            raise ConfigError(f"a matrix of {n} x {self._size} does not go with {len(self._labels)} labels")
        entries = len(self._values)
        if len(self._columns) != entries or len(self._starts) != n + 1 or self._starts[-1] != entries:
            raise ConfigError("the CSR matrix is damaged: its arrays do not fit together")
        if bool((np.diff(self._starts) < 0).any()) or self._starts[0] != 0:
            raise ConfigError("the CSR matrix is damaged: its rows do not follow each other")
        if entries and not (self._columns.min() >= 0 and self._columns.max() < self._size):
            raise ConfigError(f"the CSR matrix is damaged: a column is outside 0 to {self._size - 1}")
        if not (bool(np.isfinite(self._values).all()) and bool(np.isfinite(self._labels).all())):
            raise ConfigError("the matrix or the labels have entries that are not finite")
        if loss != "squares" and not bool((np.abs(self._labels) == 1).all()):
            raise ConfigError(f"{loss} loss needs labels of -1 and +1")
        self._out = np.zeros(self._size)
        self.solution: Vector | None = None

    @property
    def size(self) -> int:
        """The number of columns."""
        return self._size

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self._labels)

    @property
    def smoothness(self) -> float:
        """L: the largest curvature of a row's loss, which step sizes are measured by."""
        if self._kind == LOSSES["hinge"]:
            raise ConfigError("the hinge loss has no smoothness: its slope jumps")
        squares = np.add.reduceat(np.append(self._values**2, 0.0), self._starts[:-1])
        squares[np.diff(self._starts) == 0] = 0.0
        return float(squares.max()) * (0.25 if self._kind == LOSSES["logistic"] else 1.0)

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], Vector, Vector, int]:
        """Of the CSR matrix: starts of rows, columns, values; then the labels and the number of the loss."""
        return self._starts, self._columns, self._values, self._labels, self._kind

    def start(self) -> Vector:
        """Zeros."""
        return np.zeros(self._size)

    def difference(self, x: Vector, snapshot: Vector, rows: Rows) -> Vector:
        """The mean over these rows of the gradient at x minus that at the snapshot."""
        from thinwire.kernels.cpu import linear

        linear.gradient_difference(*self.arrays, rows, x, snapshot, self._out)
        return self._out

    def total(self, x: Vector, begin: int, end: int) -> tuple[float, Vector]:
        """The sums of losses and of gradients over a range of rows."""
        from thinwire.kernels.cpu import linear

        out = np.zeros(self._size)
        return linear.gradient_sum(*self.arrays, begin, end, x, out), out

    def finish(self, x: Vector) -> None:
        """Keep the parameters in `solution`."""
        self.solution = x


class ModuleProblem:
    """A module and a closure `loss(module, batch)` that gives the batch's mean loss.

    Args:
        module: its trainable parameters are flattened to float32, in their order.
        loss: called with the module and a batch.
        dataset: a tensor or a tuple of tensors with one row each per example, or anything with `len` and
            `[number]`, whose examples are put together like `DataLoader` does.
        chunk: rows at once when the full gradient is summed up.

    Both gradients of a difference see the same rows and the same random numbers (dropout). Buffers, such as
    the running means of a batch normalisation, stay on each worker and are not sent.
    """

    kernels = ("grid", "indices", "gspar")

    def __init__(self, module: nn.Module, loss: LossClosure, dataset: Any, chunk: int = 512) -> None:
        self._module, self._loss, self._chunk = module, loss, chunk
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("the module has no trainable parameters")
        self._device = self._parameters[0].device
        self._tensors = _tensors(dataset)
        self._dataset = dataset
        self._rows = len(self._tensors[0]) if self._tensors else len(dataset)
        if self._rows < 1:
            raise ConfigError("the dataset has no rows")
        if any(True for _ in module.buffers()):
            log.warning(
                "the module has buffers (%s): each worker keeps its own",
                next(iter(module.named_buffers()))[0],
            )

    @property
    def size(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self._parameters)

    @property
    def rows(self) -> int:
        """The number of examples."""
        return self._rows

    def start(self) -> Vector:
        """The module's parameters, flat."""
        return torch.cat([p.detach().float().flatten().cpu() for p in self._parameters]).numpy().copy()

    def difference(self, x: Vector, snapshot: Vector, rows: Rows) -> Vector:
        """The mean over these rows of the gradient at x minus that at the snapshot."""
        batch = self._batch(torch.from_numpy(rows))
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            _, here = self._gradient(x, batch)
        _, there = self._gradient(snapshot, batch)
        return here - there

    def total(self, x: Vector, begin: int, end: int) -> tuple[float, Vector]:
        """The sums of losses and of gradients over a range of rows."""
        losses, gradient = 0.0, np.zeros(self.size)
        for low in range(begin, end, self._chunk):
            high = min(low + self._chunk, end)
            loss, part = self._gradient(x, self._batch(torch.arange(low, high)))
            losses += loss * (high - low)
            gradient += part * (high - low)
        return losses, gradient

    def finish(self, x: Vector) -> None:
        """Write the parameters into the module."""
        self._load(x)

    def _gradient(self, x: Vector, batch: Any) -> tuple[float, Vector]:
        self._load(x)
        with torch.enable_grad():
            loss = self._loss(self._module, batch)
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g).float().flatten()
            for p, g in zip(self._parameters, cast("Sequence[torch.Tensor | None]", found), strict=True)
        ]
        return float(loss.detach()), torch.cat(flat).cpu().numpy()

    @torch.no_grad()
    def _load(self, x: Vector) -> None:
        flat = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(self._device)
        at = 0
        for p in self._parameters:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def _batch(self, rows: torch.Tensor) -> Any:
        if self._tensors is None:
            from torch.utils import data

            return cast(Any, data).default_collate([self._dataset[int(row)] for row in rows])
        found = tuple(t[rows.to(t.device)].to(self._device) for t in self._tensors)
        return found[0] if isinstance(self._dataset, torch.Tensor) else found


def _tensors(dataset: object) -> tuple[torch.Tensor, ...] | None:
    if isinstance(dataset, torch.Tensor):
        return (dataset,)
    if isinstance(dataset, tuple | list):
        parts = cast("Sequence[object]", dataset)
        if parts and all(isinstance(part, torch.Tensor) for part in parts):
            tensors = cast("tuple[torch.Tensor, ...]", tuple(parts))
            if len({len(t) for t in tensors}) != 1:
                raise ConfigError(
                    f"the tensors of the dataset have different lengths: {[len(t) for t in tensors]}"
                )
            return tensors
    other = cast(object, dataset)
    if not hasattr(other, "__len__") or not hasattr(other, "__getitem__"):
        raise ConfigError(
            "the dataset must be tensors, or have a length and examples by number, "
            f"not {type(other).__name__}"
        )
    return None


def as_problem(model: object, loss: object, dataset: object) -> Problem:
    """The problem of `asylpg(model, loss, dataset)`, or the problem that was given itself."""
    if isinstance(model, nn.Module):
        if not callable(loss) or dataset is None:
            raise ConfigError("a module needs loss=a function of (module, batch), and dataset=its rows")
        return ModuleProblem(model, cast(LossClosure, loss), dataset)
    if not isinstance(model, Problem):
        raise ConfigError(
            f"the model must be an nn.Module, a LinearProblem or another Problem, not {type(model).__name__}"
        )
    if loss is not None or dataset is not None:
        raise ConfigError("a Problem has its own loss and rows: give loss and dataset only with an nn.Module")
    return model
