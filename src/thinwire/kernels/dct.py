"""The orthonormal discrete cosine transform (DCT-II) of a matrix, in chunks of at most 64 x 64.

Every side is cut into equal pieces of at most 64, as few as possible: 768 into 12 of 64, 96 into 2 of 48, 65
into 2 of 33. Where the pieces are a little longer than the side, the matrix is padded with zeros: by less
than one row or column for each piece. A vector is a matrix of one row.

Coefficients are stored chunk by chunk, each by rows, the lowest frequencies first.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import dct as reference


class Chunks(NamedTuple):
    """A matrix of so many rows and columns, in chunks of `height` x `width`."""

    rows: int
    cols: int
    height: int
    width: int

    @staticmethod
    def of(shape: Sequence[int], side: int = 64) -> "Chunks":
        """For a tensor of this shape; dimensions after the first are one."""
        rows = shape[0] if len(shape) > 1 else 1
        cols = math.prod(shape[1:] if len(shape) > 1 else shape)
        return Chunks(rows, cols, _piece(rows, side), _piece(cols, side))

    @property
    def size(self) -> int:
        """The coefficients of a chunk."""
        return self.height * self.width

    @property
    def total(self) -> int:
        """All coefficients; more than entries if the matrix is padded."""
        return -(-self.rows // self.height) * -(-self.cols // self.width) * self.size


def dct(x: Tensor, chunks: Chunks, out: Tensor) -> None:
    """out = the coefficients of the matrix x."""
    _check(x, "out", out, chunks)
    dispatch(reference.dct, x, *chunks, out)


def inverse_dct(coefficients: Tensor, chunks: Chunks, out: Tensor) -> None:
    """out = the matrix with these coefficients. They may be overwritten; the padding is dropped."""
    _check(out, "coefficients", coefficients, chunks)
    dispatch(reference.inverse_dct, coefficients, *chunks, out)


def _piece(length: int, most: int) -> int:
    return -(-length // -(-length // most)) if length else 1


def _check(matrix: Tensor, name: str, coefficients: Tensor, chunks: Chunks) -> None:
    check.flat_float32("the matrix", matrix)
    check.flat_float32(name, coefficients)
    for tensor, numel in ((matrix, chunks.rows * chunks.cols), (coefficients, chunks.total)):
        if tensor.numel() != numel:
            raise ValueError(f"{chunks} have {numel} numbers, not {tensor.numel()}")
