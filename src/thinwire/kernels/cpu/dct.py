"""The discrete cosine transform by chunks on the CPU: fast for 64 x 64, matrix products for other chunks.

A chunk is transformed along its columns and transposed, twice, in the first-level cache. Results differ from
those of the reference by rounding.
"""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._simd_dct import SIDE, cosine64, inverse_cosine64
from thinwire.kernels.cpu._tensors import view
from thinwire.kernels.reference import dct as reference

_CHUNK = SIDE * SIDE
_COLUMNS = 8
_SCALE = np.float32(1 / SIDE)


@kernel
def chunks_of(x: F32, rows: int, cols: int, first: int, scratch: F32, out: F32) -> None:
    """The coefficients of chunks from the first on, as many as fit `out`."""
    across = (cols + SIDE - 1) // SIDE
    for at in range(0, len(out), _CHUNK):
        tile = out[at : at + _CHUNK]
        number = first + at // _CHUNK
        top, left = number // across * SIDE, number % across * SIDE
        wide = min(SIDE, cols - left)
        for i in range(SIDE):
            row = tile[i * SIDE : (i + 1) * SIDE]
            if top + i < rows:
                begin = (top + i) * cols + left
                given = x[begin : begin + wide]
                for j in range(wide):
                    row[j] = given[j] * _SCALE
                for j in range(wide, SIDE):
                    row[j] = 0.0
            else:
                for j in range(SIDE):
                    row[j] = 0.0
        for column in range(0, SIDE, _COLUMNS):
            cosine64(tile, column, scratch)
        for column in range(0, SIDE, _COLUMNS):
            cosine64(scratch, column, tile)


@kernel
def chunks_back(coefficients: F32, rows: int, cols: int, first: int, scratch: F32, out: F32) -> None:
    """The matrix from its coefficients, which are overwritten."""
    across = (cols + SIDE - 1) // SIDE
    for at in range(0, len(coefficients), _CHUNK):
        tile = coefficients[at : at + _CHUNK]
        number = first + at // _CHUNK
        top, left = number // across * SIDE, number % across * SIDE
        wide = min(SIDE, cols - left)
        for column in range(0, SIDE, _COLUMNS):
            inverse_cosine64(tile, column, scratch)
        for column in range(0, SIDE, _COLUMNS):
            inverse_cosine64(scratch, column, tile)
        for i in range(min(SIDE, rows - top)):
            row = tile[i * SIDE : i * SIDE + wide]
            begin = (top + i) * cols + left
            to = out[begin : begin + wide]
            for j in range(wide):
                to[j] = row[j] * _SCALE


def dct(x: Tensor, rows: int, cols: int, height: int, width: int, out: Tensor) -> None:
    if height != SIDE or width != SIDE:
        reference.dct(x, rows, cols, height, width, out)
        return

    def work(lo: int, hi: int) -> None:
        scratch = scratch_array("chunk", np.float32, _CHUNK)
        chunks_of(view(x), rows, cols, lo // _CHUNK, scratch, view(out)[lo:hi])

    _pool.run_cuts(work, _pool.cuts(out.numel()))


def inverse_dct(coefficients: Tensor, rows: int, cols: int, height: int, width: int, out: Tensor) -> None:
    if height != SIDE or width != SIDE:
        reference.inverse_dct(coefficients, rows, cols, height, width, out)
        return

    def work(lo: int, hi: int) -> None:
        scratch = scratch_array("chunk", np.float32, _CHUNK)
        chunks_back(view(coefficients)[lo:hi], rows, cols, lo // _CHUNK, scratch, view(out))

    _pool.run_cuts(work, _pool.cuts(coefficients.numel()))


def warm() -> None:
    x = torch.zeros(_CHUNK)
    dct(x, SIDE, SIDE, SIDE, SIDE, x)
    inverse_dct(x, SIDE, SIDE, SIDE, SIDE, x)
