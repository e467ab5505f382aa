"""Tensors in and out of kernels, which work on float32: others are widened without a full-size copy."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, kernel
from thinwire.kernels.cpu._memory import scratch_tensor

T = TypeVar("T")

# Half precision is widened this many entries at a time: about a second-level cache.
WIDEN = 4 * _pool.GRAIN

Work = Callable[[F32, F32 | None, int], T]


class Source(NamedTuple):
    """What a kernel reads: the values a, or a + b (a residual plus a gradient) rounded to float32."""

    a: Tensor
    b: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.a.numel()

    @property
    def direct(self) -> bool:
        """Kernels can read the tensors as they are."""
        return self.a.dtype == torch.float32 and (self.b is None or self.b.dtype == torch.float32)

    def cuts(self) -> list[_pool.Cut]:
        return _pool.cuts(self.numel) if self.direct else [(0, self.numel)]

    def views(self, lo: int, hi: int) -> tuple[F32, F32 | None]:
        """The range as arrays whose sum is meant; only if `direct`."""
        return view(self.a)[lo:hi], None if self.b is None else view(self.b)[lo:hi]

    def widened(self, block: int = WIDEN) -> Iterator[tuple[F32, int]]:
        """Float32 blocks in order; each is overwritten by the next."""
        scratch = scratch_tensor("widened", min(self.numel, block))
        for lo in range(0, self.numel, block):
            wide = scratch[: min(block, self.numel - lo)]
            part = self.a[lo : lo + block]
            if self.b is None:
                wide.copy_(part)
            else:
                torch.add(part, self.b[lo : lo + block], out=wide)
            yield view(wide), lo

    def in_order(self) -> Iterator[tuple[F32, F32 | None, int]]:
        """All of it in order and in one thread: in one piece if `direct`, else in widened blocks."""
        if self.direct:
            yield *self.views(0, self.numel), 0
        else:
            for block, lo in self.widened():
                yield block, None, lo

    def run(self, work: Work[T], grain: int = _pool.GRAIN) -> list[T]:
        """work(a, b or None, first position) over ranges that together make the whole, in order.

        Ranges begin at multiples of `grain`.
        """
        if self.direct:
            ranges = _pool.cuts(self.numel, grain)
            return _pool.run_cuts(lambda lo, hi: work(*self.views(lo, hi), lo), ranges)
        block = grain * max(1, WIDEN // grain)
        return [work(wide, None, lo) for wide, lo in self.widened(block)]


def view(tensor: Tensor) -> F32:
    return tensor.detach().numpy()


@kernel
def summed(a: F32, b: F32 | None, lo: int, hi: int, scratch: F32) -> F32:
    """Entries lo .. hi of a, or of a + b in scratch memory."""
    if b is None:
        return a[lo:hi]
    first, second, tile = a[lo:hi], b[lo:hi], scratch[: hi - lo]
    for j in range(len(tile)):
        tile[j] = first[j] + second[j]
    return tile


@kernel
def fill(tile: F32, value: np.float32) -> None:
    # A loop: slice assignment would not vectorise.
    for j in range(len(tile)):
        tile[j] = value


@kernel
def divide(tile: F32, workers: int) -> None:
    """tile /= workers, by a product where that gives the same bits."""
    if workers == 1:
        return
    if workers & (workers - 1) == 0:
        inverse = np.float32(1.0 / workers)
        for j in range(len(tile)):
            tile[j] *= inverse
    else:
        by = np.float32(workers)
        for j in range(len(tile)):
            tile[j] /= by


def through_float32(out: Tensor, work: Callable[[F32, int], None]) -> None:
    """work(float32 part, first position) for parts of `out`, which begin at multiples of the pool's grain."""
    n = out.numel()
    if out.dtype == torch.float32:
        _pool.run_cuts(lambda lo, hi: work(view(out)[lo:hi], lo), _pool.cuts(n))
        return
    scratch = scratch_tensor("narrowed", min(n, WIDEN))
    for lo in range(0, n, WIDEN):
        part = scratch[: min(WIDEN, n - lo)]
        work(view(part), lo)
        out[lo : lo + WIDEN].copy_(part)
