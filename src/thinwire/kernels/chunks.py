"""Top-k by chunks: the same number of entries from every stretch of a tensor, with no global selection."""

from typing import NamedTuple

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import chunks as reference


class PerChunk(NamedTuple):
    """`k` entries of every `chunk` entries; a short last chunk gives its share, at least one."""

    k: int
    chunk: int

    def of_last(self, n: int) -> int:
        """How many entries the last chunk of n gives."""
        length = n - (self._chunks(n) - 1) * self.chunk
        return min(self.k, -(-self.k * length // self.chunk)) if n else 0

    def total(self, n: int) -> int:
        """How many of n entries are selected."""
        return (self._chunks(n) - 1) * self.k + self.of_last(n) if n else 0

    def _chunks(self, n: int) -> int:
        return -(-n // self.chunk)


def chunk_topk(x: Tensor, per: PerChunk) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of every chunk: (indices, values), ranked and ordered as in `topk`."""
    check.flat_float("x", x)
    _check(per)
    return dispatch(reference.chunk_topk, x, None, per.k, per.of_last(x.numel()), per.chunk)


def select_feedback_chunk_topk(residual: Tensor, grad: Tensor, per: PerChunk) -> tuple[Tensor, Tensor]:
    """What `feedback_chunk_topk` would select, writing nothing."""
    check.residual_and_grad(residual, grad)
    _check(per)
    return dispatch(reference.chunk_topk, residual, grad, per.k, per.of_last(residual.numel()), per.chunk)


def feedback_chunk_topk(
    residual: Tensor, grad: Tensor, per: PerChunk, undo: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """residual += grad; take the largest of every chunk out of it. `undo` is that of `feedback_topk`."""
    check.residual_and_grad(residual, grad, undo)
    _check(per)
    last = per.of_last(residual.numel())
    return dispatch(reference.feedback_chunk_topk, residual, grad, per.k, last, per.chunk, undo)


def _check(per: PerChunk) -> None:
    if not 1 <= per.k <= per.chunk:
        raise ValueError(f"k must be from 1 to the chunk's {per.chunk} entries, got {per.k}")
