"""ScaleCom's quasi-sort: the largest magnitude of every chunk."""

from torch import Tensor

from thinwire.kernels import _check
from thinwire.kernels._dispatch import on_cpu
from thinwire.kernels.reference import scalecom as reference


def chunk_argmax(x: Tensor, chunk: int) -> Tensor:
    """Where the largest magnitude is in every `chunk` entries (the last may be short), ranked as `topk`."""
    _check.flat_float("x", x)
    _check_chunk(chunk)
    return _impl(x).chunk_argmax(x, chunk)


def chunk_argmax_sum(residual: Tensor, grad: Tensor, chunk: int) -> Tensor:
    """`chunk_argmax(residual + grad)`, writing nothing."""
    _check.flat_float32("residual", residual)
    _check.flat_float("grad", grad)
    _check.same_size("residual", residual, "grad", grad)
    _check_chunk(chunk)
    return _impl(residual, grad).chunk_argmax_sum(residual, grad, chunk)


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")


def _impl(*tensors: Tensor):
    if on_cpu(*tensors):
        from thinwire.kernels.cpu import scalecom

        return scalecom
    return reference
