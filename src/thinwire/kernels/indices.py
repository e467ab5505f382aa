"""Codes of ascending indices: a bitmap, or Elias-Fano with `low` plain bits an index."""

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import indices as reference


def bitmap(indices: Tensor, n: int) -> Tensor:
    """ceil(n / 8) bytes with a bit set for every index."""
    _check_indices(indices, n)
    return dispatch(reference.bitmap, indices, n)


def from_bitmap(code: Tensor, n: int, k: int) -> Tensor:
    """The k indices of a bitmap; PayloadError if it has another number of bits set, or any beyond n."""
    check.packed(code, (n + 7) // 8)
    found = dispatch(reference.from_bitmap, code)
    if found.numel() != k or (k and int(found[-1]) >= n):
        raise PayloadError(f"a bitmap has {found.numel()} bits set, expected {k} below {n}")
    return found


def elias_fano(indices: Tensor, n: int, low: int) -> Tensor:
    """The low bits of every index, packed; then a bit at (index >> low) + position for every index."""
    _check_indices(indices, n)
    return dispatch(reference.elias_fano, indices, n, low)


def from_elias_fano(code: Tensor, n: int, k: int, low: int) -> Tensor:
    """The k indices; PayloadError unless they ascend strictly within [0, n)."""
    plain = (k * low + 7) // 8
    check.packed(code, plain + (k + (n >> low) + 8) // 8)
    found = dispatch(reference.from_elias_fano, code, k, low, plain)
    if found is None or (k and (int(found[-1]) >= n or not bool((found[1:] > found[:-1]).all()))):
        raise PayloadError(f"an index code does not hold {k} ascending indices below {n}")
    return found


def _check_indices(indices: Tensor, n: int) -> None:
    if indices.dtype != torch.int32 or indices.dim() != 1:
        raise ValueError(f"indices must be flat int32, got {indices.dtype}")
    if indices.numel() and (int(indices[0]) < 0 or int(indices[-1]) >= n):
        raise ValueError(f"indices reach from {int(indices[0])} to {int(indices[-1])}, outside [0, {n})")
