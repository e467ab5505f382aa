"""What a kernel reads: a tensor, or a residual plus a gradient, as float32 without a full-size copy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool, _scratch
from thinwire.kernels.cpu._jit import F32

T = TypeVar("T")

# Half-precision input is widened this many entries at a time: about a second-level cache.
WIDEN = 1 << 18

Work = Callable[[F32, F32 | None, int], T]


@dataclass(frozen=True, slots=True)
class Source:
    """The values a, or a + b rounded to float32."""

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
        return view(self.a[lo:hi]), None if self.b is None else view(self.b[lo:hi])

    def widened(self) -> Iterator[tuple[F32, int]]:
        """Float32 blocks in order; each is overwritten by the next."""
        scratch = _scratch.float32("widened", min(self.numel, WIDEN))
        for lo in range(0, self.numel, WIDEN):
            block = scratch[: min(WIDEN, self.numel - lo)]
            part = self.a[lo : lo + WIDEN]
            if self.b is None:
                block.copy_(part)
            else:
                torch.add(part, self.b[lo : lo + WIDEN], out=block)
            yield view(block), lo

    def pieces(self) -> Iterator[tuple[F32, int]]:
        """All of a lone tensor in order: in one piece if it can be read as it is, else in widened blocks."""
        if self.direct and self.b is None:
            yield view(self.a), 0
        else:
            yield from self.widened()

    def run(self, work: Work[T]) -> list[T]:
        """work(a, b or None, first position) over ranges that together make the whole, in order."""
        if self.direct:
            return _pool.run_cuts(lambda lo, hi: work(*self.views(lo, hi), lo), self.cuts())
        return [work(block, None, lo) for block, lo in self.widened()]


def view(tensor: Tensor) -> F32:
    return tensor.detach().numpy()
