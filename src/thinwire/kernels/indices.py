"""Codes of ascending indices: a bitmap, Elias-Fano or Rice, the last two with `low` plain bits an index.

On other devices than a CPU, decoders do not look at the values, so that the host need not wait: the caller
asks `ascending_flag` of all indices together, which refuses whatever does not ascend within [0, n).
"""

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import indices as reference
from thinwire.kernels.reference.indices import INDEX_BITS
from thinwire.kernels.scatter import ascending_in_range


def bitmap(indices: Tensor, n: int) -> Tensor:
    """ceil(n / 8) bytes with a bit set for every index."""
    _check_indices(indices, n)
    return dispatch(reference.bitmap, indices, n)


def from_bitmap(code: Tensor, n: int, k: int) -> Tensor:
    """The k indices of a bitmap; PayloadError if it has another number of bits set, or any beyond n."""
    check.packed(code, (n + 7) // 8)
    if code.device.type != "cpu":
        return dispatch(reference.static_from_bitmap, code, k)
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
    if code.device.type != "cpu":
        return dispatch(reference.static_from_elias_fano, code, k, low, plain)
    found = dispatch(reference.from_elias_fano, code, k, low, plain)
    if found is None or not ascending_in_range(found, n):
        raise PayloadError(f"an index code does not hold {k} ascending indices below {n}")
    return found


def rice(marked: Tensor, n: int, low: int, signed: bool = False) -> Tensor:
    """The gaps between ascending indices below n: the low bits of each, packed; then its high bits in unary.

    With `signed`, the highest bit of an index is a sign, which becomes one more plain bit.
    """
    _check_indices(marked, n, signed)
    return dispatch(reference.rice, marked, n, low, int(signed))


def from_rice(code: Tensor, n: int, k: int, low: int, signed: bool = False) -> Tensor:
    """The k indices; PayloadError unless the code holds exactly these, ascending strictly within [0, n)."""
    if k == code.numel() == 0:  # a split reduction has thousands of empty lists
        return torch.empty(0, dtype=torch.int32, device=code.device)
    plain = (k * (low + signed) + 7) // 8
    # Every index has a one in the unary part, whose last byte has the last of them.
    if code.dtype == torch.uint8 and code.dim() == 1 and plain + (k + 7) // 8 <= code.numel():
        if code.device.type != "cpu" and k:
            return dispatch(reference.static_from_rice, code, k, low, int(signed), plain)
        found = dispatch(reference.from_rice, code.contiguous(), n, k, low, int(signed), plain)
        if found is not None:
            return found
    raise PayloadError(f"a Rice code of {code.numel()} bytes does not hold {k} ascending indices below {n}")


def _check_indices(indices: Tensor, n: int, signed: bool = False) -> None:
    if indices.dtype != torch.int32 or indices.dim() != 1:
        raise ValueError(f"indices must be flat int32, got {indices.dtype}")
    if not indices.numel() or indices.device.type != "cpu":
        return  # these indices are this rank's own: the host does not wait for a device to see them
    first, last = (int(index) & INDEX_BITS if signed else int(index) for index in (indices[0], indices[-1]))
    if first < 0 or last >= n:
        raise ValueError(f"indices reach from {first} to {last}, outside [0, {n})")
