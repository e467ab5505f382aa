"""Gradients as matrices, the factors of their low-rank approximation, and the options of PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from thinwire.core import (
    Channel,
    Exchange,
    Layout,
    Link,
    Slot,
    State,
    Traits,
    checks,
    hint,
    replicated,
    residual,
)


@dataclass
class Factors(State):
    """The residual, and the last P and Q; `p` is empty if it is not needed again."""

    error: torch.Tensor = residual()
    p: torch.Tensor = replicated()
    q: torch.Tensor = replicated()
    begun: bool = hint(False)
    """Whether this process has committed a factor. If not, only the factors know whether there is one."""


@dataclass(frozen=True)
class LowRank(Exchange):
    """The options, state and sizes of PowerSGD."""

    rank: int = 4
    warm_start: bool = True
    feedback: bool = True
    start_after: int = 0
    alternate: bool = False

    def __post_init__(self) -> None:
        checks.whole(self.name, "rank", self.rank, 1)
        checks.whole(self.name, "start_after", self.start_after, 0)
        for option in ("warm_start", "feedback", "alternate"):
            checks.flag(self.name, option, getattr(self, option))

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback, payload="alternating" if self.alternate else "fixed")

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback")

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        n, m, r = dimensions(slot, self.rank)
        return None if small or len(slot.shape) < 2 or r * (n + m) >= n * m else self

    def init(self, layout: Layout) -> Factors:
        (n, m, r), device = dimensions(layout.slots[0], self.rank), layout.device
        error = torch.zeros(layout.numel if self.feedback else 0, device=device)
        p = torch.zeros(n if self.alternate else 0, r, device=device)
        return Factors(error, p, torch.zeros(m, r, device=device))

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        n, m, r = dimensions(layout.slots[0], self.rank)
        return r * (max(n, m) if self.alternate else n + m) * 4


def dimensions(slot: Slot, rank: int) -> tuple[int, int, int]:
    """Rows n and columns m of the matrix, and columns r of its factors."""
    n = slot.shape[0] if slot.shape else 1
    m = slot.numel // n if n else 0
    return n, m, min(rank, n, m)


def matrix(flat: torch.Tensor, m: int, turned: bool) -> torch.Tensor:
    """A view of this tensor as a matrix of m columns, or its transpose."""
    found = flat.view(-1, m)
    return found.T if turned else found


def first_factor(last: torch.Tensor, ch: Channel, *, warm: bool, begun: bool) -> torch.Tensor:
    """The factor to begin with: the last one if `warm`, else a random one. The same on all ranks."""
    if warm and (begun or bool(last.any())):
        return last
    return torch.randn(last.shape, generator=ch.shared_rng()).to(last.device)


def times(M: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """M @ factor. For few columns BLAS is up to twenty times faster with the transposes."""
    return (factor.T.contiguous() @ M.T).T.contiguous()


def write_product(P: torch.Tensor, Q: torch.Tensor, out: torch.Tensor) -> None:
    """out = P Q^T, without a copy if `out` is float32."""
    if out.dtype == torch.float32:
        torch.mm(P, Q.T, out=out)
    else:
        out.copy_(P @ Q.T)


def orthogonalise(factor: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.linalg.qr(factor)[0])
