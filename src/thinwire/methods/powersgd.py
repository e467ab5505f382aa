"""Low-rank approximation by one step of the power method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.methods.dense import exact_mean
from thinwire.methods.families.feedback import DenseMemory
from thinwire.methods.families.low_rank import Factors, dimensions, matrix, random_factor


@dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends two thin matrices whose product approximates the mean gradient; two rounds, or one by turns.

    M_i = g_i + e_i as an n x m matrix;  P = orthogonalise(mean_i M_i Q);  Q_i = M_i^T P;  Q = mean_i Q_i
    out = P Q^T;  e_i = M_i - P Q_i^T

    With `alternate` only one of the two, from the other's last value, in one round with half the bytes:
    P_i = M_i orthogonalise(Q), out = mean_i P_i Q^T;  in the next step Q_i = M_i^T orthogonalise(P); etc.

    Vectors, and matrices that two factors would not make smaller, are sent dense.

    Args:
        rank: columns of the factors.
        warm_start: begin with the last step's Q (the default), else with a fresh random one.
        feedback: add what is not sent to the next gradient (the default).
        start_after: dense steps before the first compressed one.
        alternate: send the longer factor at even steps and the shorter one at odd steps.

    Differences from the paper: the error is M_i - P Q_i^T, as in the authors' library; the paper's
    M_i - P Q^T has the same sum over the ranks and more energy. QR instead of Gram-Schmidt.
    """

    name = "powersgd"
    formula = "4 * min(rank, rows, cols) * (rows + cols)"
    reference = (
        'Vogels, Karimireddy and Jaggi, "PowerSGD", 2019; `alternate`: Zhang, Zhang, Shi, Chu and Li, '
        '"Evaluation and optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023'
    )
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

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Factors, ch: Channel) -> None:
        if ch.step < self.start_after:
            await exact_mean(x, out, ch)
            return
        n, m = x.numel() // state.q.shape[0], state.q.shape[0]
        # The longer factors of all tensors travel in the same steps, so that `payload_bytes` is one step's.
        turned = self.alternate and (n >= m) == (ch.step % 2 == 0)  # to send P: the same for M^T
        p, q = (state.q, state.p) if turned else (state.p, state.q)
        start = p if self.alternate else q
        if not self.warm_start or not bool(start.any()):
            start = random_factor(start, ch)
        with DenseMemory(state.error, x, out) as memory:
            M = matrix(memory.u.float(), m, turned)  # M = g + e
            if not self.alternate:
                start = await ch.mean(M @ start)  # P = mean M Q
                if not bool(start.isfinite().all()):  # equal on all ranks: all leave out the second round
                    await ch.commit(False)
                    return
            P = cast(torch.Tensor, torch.linalg.qr(start)[0])  # P = orthogonalise(P)
            mine = M.T @ P  # Q_i = M^T P
            Q = await ch.mean(mine)  # Q = mean Q_i
            if await ch.commit(bool(Q.isfinite().all())):
                q.copy_(Q)
                e = memory.commit()
                if self.feedback:
                    matrix(e, m, turned).addmm_(P, mine.T, alpha=-1)  # e = M - P Q_i^T
        if out.dtype == torch.float32:
            torch.mm(P, Q.T, out=matrix(out, m, turned))  # out = P Q^T
        else:
            matrix(out, m, turned).copy_(P @ Q.T)

    def exact(self) -> Exchange:
        """Full rank: no matrix is worth it any more, and all go dense."""
        return replace(self, rank=2**31)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        n, m, r = dimensions(layout.slots[0], self.rank)
        return r * (max(n, m) if self.alternate else n + m) * 4
