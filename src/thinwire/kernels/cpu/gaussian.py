"""Gaussian-k on the CPU: moments in one pass, then compaction passes that double as counts."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _collect
from thinwire.kernels.cpu._jit import F32, I32
from thinwire.kernels.cpu._sums import finite_sums
from thinwire.kernels.cpu._tensors import Source
from thinwire.kernels.cpu.selection import magnitude_bits, topk_of
from thinwire.kernels.reference.gaussian import first_threshold, search


def gaussiank(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    source = Source(x, grad)
    if k in (0, source.numel):
        return topk_of(source, k)
    return select_by_moments(source, k, finite_sums(source))


def select_by_moments(source: Source, k: int, sums: tuple[int, float, float]) -> tuple[Tensor, Tensor]:
    most = 4 * k // 3
    last: dict[float, tuple[I32, F32]] = {}  # in scratch memory, which holds one at a time

    def count(t: float) -> int:
        last.clear()
        found = _collect.survivors(source, magnitude_bits(t), most)
        if found is None:
            return most + 1  # it stopped early: too many is all that the search needs to know
        last[t] = found
        return len(found[0])

    t = search(first_threshold(*sums, k, source.numel), k, count)
    if t is None:
        return topk_of(source, k)
    if t not in last:
        count(t)
    indices, values = last[t]
    return torch.from_numpy(indices.copy()), torch.from_numpy(values.copy())


def warm() -> None:
    x = torch.arange(-100.0, 100.0)
    for grad in (None, x):
        gaussiank(x, grad, 10)
    gaussiank(x * np.inf, None, 10)
