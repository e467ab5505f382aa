"""Sparse mean on the CPU, one index range after the other, so that the output stays in the cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu._jit import F32, I32, I64, U64, kernel
from thinwire.kernels.cpu._memory import addresses, float32_at, int32_at, scratch_array
from thinwire.kernels.cpu._tensors import divide, fill, through_float32

_TILE = 4096


@kernel
def ascending(indices: I32) -> bool:
    before = indices[:-1]
    after = indices[1:]
    wrong = 0
    for j in range(len(before)):
        wrong += int(after[j] <= before[j])
    return wrong == 0


@kernel
def scatter_range(
    out: F32, base: int, indices: U64, values: U64, lengths: I64, at: I64, workers: int
) -> None:
    """out[j] is entry base + j of the mean; indices have been checked to ascend within the whole tensor."""
    for w in range(workers):
        at[w] = np.searchsorted(int32_at(indices[w], lengths[w]), base)
    for lo in range(0, len(out), _TILE):
        hi = min(lo + _TILE, len(out))
        tile = out[lo:hi]
        fill(tile, np.float32(0.0))
        for w in range(workers):
            where = int32_at(indices[w], lengths[w])
            what = float32_at(values[w], lengths[w])
            j = at[w]
            while j < len(where) and where[j] < base + hi:
                tile[where[j] - base - lo] += what[j]
                j += 1
            at[w] = j
        divide(tile, workers)


def ascending_in_range(indices: Tensor, numel: int) -> bool:
    n = indices.numel()
    if n == 0:
        return True
    array = indices.numpy()
    return bool(array[0] >= 0) and bool(array[n - 1] < numel) and ascending(array)


def scatter_mean(indices: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> None:
    workers = len(indices)
    where, what = addresses(indices), addresses(values)
    lengths = np.array([i.numel() for i in indices], np.int64)

    def work(part: F32, lo: int) -> None:
        at = scratch_array("scatter positions", np.int64, workers)
        scatter_range(part, lo, where, what, lengths, at, workers)

    through_float32(out, work)


def warm() -> None:
    i, v = torch.tensor([1, 3], dtype=torch.int32), torch.ones(2)
    ascending_in_range(i, 5)
    scatter_mean([i, i], [v, v], torch.empty(5))
