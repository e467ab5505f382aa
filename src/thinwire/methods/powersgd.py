"""Low-rank approximation by one step of the power method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch

from thinwire import checks
from thinwire.channel import Channel
from thinwire.exchange import Exchange, State, Traits, replicated, residual
from thinwire.layout import Layout, Slot


@dataclass
class PowerSGDState(State):
    error: torch.Tensor = residual()
    q: torch.Tensor = replicated()


@dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends two thin matrices whose product approximates the mean gradient; two dependent rounds.

    M_i = g_i + e_i as an n x m matrix;  P = orthogonalise(mean_i M_i Q);  Q_i = M_i^T P;  Q = mean_i Q_i
    out = P Q^T;  e_i = M_i - P Q_i^T

    Vectors, and matrices that two factors would not make smaller, are sent dense.

    Args:
        rank: columns of the factors.
        warm_start: begin with the last step's Q (the default), else with a fresh random one.
        feedback: keep what is not sent (the default).

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019.

    Differences from the paper: the error is M_i - P Q_i^T, as in the authors' library; the paper's
    M_i - P Q^T has the same sum over the ranks and more energy. QR instead of Gram-Schmidt.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    warm_start: bool = True
    feedback: bool = True

    def __post_init__(self) -> None:
        checks.at_least(self.name, "rank", self.rank, 1)
        checks.flag(self.name, "warm_start", self.warm_start)
        checks.flag(self.name, "feedback", self.feedback)

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback)

    def accepts(self, slot: Slot) -> bool:
        if len(slot.shape) < 2:
            return False
        n, m, r = self._dimensions(slot)
        return r * (n + m) < n * m

    def init(self, layout: Layout) -> PowerSGDState:
        _, m, r = self._dimensions(_only(layout))
        size = layout.numel if self.feedback else 0
        error = torch.zeros(size, device=layout.device)
        return PowerSGDState(error, torch.zeros(m, r, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: PowerSGDState, ch: Channel) -> None:
        q = state.q
        m, r = q.shape
        matrix = (x + state.error if self.feedback else x.to(q.dtype)).view(-1, m)
        if not self.warm_start or not bool(q.any()):
            q = torch.randn(m, r, generator=ch.shared_rng(), dtype=q.dtype, device=q.device)
        p = await ch.mean(matrix @ q)
        if not bool(p.isfinite().all()):  # equal on all ranks, so all of them leave out the second round
            await ch.settled(False)
            return
        p = cast(torch.Tensor, torch.linalg.qr(p)[0])
        mine = matrix.T @ p
        q = await ch.mean(mine)
        if await ch.settled(bool(q.isfinite().all())):
            state.q.copy_(q)
            if self.feedback:
                state.error.copy_((matrix - p @ mine.T).view(-1))
        out.copy_((p @ q.T).view(-1))

    def exact(self) -> Exchange:
        """Full rank: no matrix is worth it any more, and all go dense."""
        return replace(self, rank=2**31)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        n, m, r = self._dimensions(_only(layout))
        return r * (n + m) * 4

    def _dimensions(self, slot: Slot) -> tuple[int, int, int]:
        n = slot.shape[0] if slot.shape else 1
        m = slot.numel // n if n else 0
        return n, m, min(self.rank, n, m)


def _only(layout: Layout) -> Slot:
    (slot,) = layout.slots
    return slot
