"""The discrete cosine transform by chunks in plain torch: a matrix product on either side."""

import math
from functools import cache

import torch
from torch import Tensor


def dct(x: Tensor, rows: int, cols: int, height: int, width: int, out: Tensor) -> None:
    down, across = -(-rows // height), -(-cols // width)
    padded = x.new_zeros(down * height, across * width)
    padded[:rows, :cols] = x.view(rows, cols)
    chunks = padded.view(down, height, across, width).transpose(1, 2)
    out.view(down, across, height, width).copy_(basis(height, x) @ chunks @ basis(width, x).T)


def inverse_dct(coefficients: Tensor, rows: int, cols: int, height: int, width: int, out: Tensor) -> None:
    down, across = -(-rows // height), -(-cols // width)
    chunks = basis(height, out).T @ coefficients.view(down, across, height, width) @ basis(width, out)
    padded = chunks.transpose(1, 2).reshape(down * height, across * width)
    out.view(rows, cols).copy_(padded[:rows, :cols])


def basis(size: int, like: Tensor) -> Tensor:
    """Row k is the k-th cosine, of norm 1."""
    return _basis(size).to(like.device)


@cache
def _basis(size: int) -> Tensor:
    k = torch.arange(size, dtype=torch.float64)
    cosines = torch.cos(k[:, None] * (2 * k + 1) * (math.pi / (2 * size))) * math.sqrt(2 / size)
    cosines[:1] *= math.sqrt(0.5)
    return cosines.float()
