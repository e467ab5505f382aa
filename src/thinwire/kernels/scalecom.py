"""ScaleCom's quasi-sort: the largest magnitude of every chunk."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import scalecom as reference


def chunk_argmax(x: Tensor, chunk: int) -> Tensor:
    """Where the largest magnitude is in every `chunk` entries (the last may be short), ranked as `topk`."""
    check.flat_float("x", x)
    _check_chunk(chunk)
    return dispatch(reference.chunk_argmax, x, None, chunk)


def chunk_argmax_sum(residual: Tensor, grad: Tensor, chunk: int) -> Tensor:
    """`chunk_argmax(residual + grad)`, writing nothing."""
    check.residual_and_grad(residual, grad)
    _check_chunk(chunk)
    return dispatch(reference.chunk_argmax, residual, grad, chunk)


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
