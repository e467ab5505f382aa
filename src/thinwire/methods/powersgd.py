"""Low-rank approximation by one step of the power method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch

from thinwire import checks, kernels
from thinwire.channel import Channel
from thinwire.exchange import Exchange, State, Traits, replicated, residual
from thinwire.layout import Layout, Slot


@dataclass
class PowerSGDState(State):
    """`p` is empty where it is not needed again: it is only with `alternate`."""

    error: torch.Tensor = residual()
    p: torch.Tensor = replicated()
    q: torch.Tensor = replicated()


@dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends two thin matrices whose product approximates the mean gradient; two rounds, or one by turns.

    M_i = g_i + e_i as an n x m matrix;  P = orthogonalise(mean_i M_i Q);  Q_i = M_i^T P;  Q = mean_i Q_i
    out = P Q^T;  e_i = M_i - P Q_i^T

    With `alternate` only one of the two, from the other's last value, one round and half the bytes a step:
    P_i = M_i orthogonalise(Q), out = mean_i P_i Q^T;  in the next step Q_i = M_i^T orthogonalise(P); etc.

    Vectors, and matrices that two factors would not make smaller, are sent dense.

    Args:
        rank: columns of the factors.
        warm_start: begin with the last step's Q (the default), else with a fresh random one.
        feedback: keep what is not sent (the default).
        start_after: dense steps before the first compressed one.
        alternate: send the longer factor at even steps and the shorter one at odd steps.

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019; `alternate`: Zhang, Zhang, Shi, Chu and Li,
    "Evaluation and optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023.

    Differences from the paper: the error is M_i - P Q_i^T, as in the authors' library; the paper's
    M_i - P Q^T has the same sum over the ranks and more energy. QR instead of Gram-Schmidt.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    warm_start: bool = True
    feedback: bool = True
    start_after: int = 0
    alternate: bool = False

    def __post_init__(self) -> None:
        checks.at_least(self.name, "rank", self.rank, 1)
        checks.flag(self.name, "warm_start", self.warm_start)
        checks.flag(self.name, "feedback", self.feedback)
        checks.at_least(self.name, "start_after", self.start_after, 0)
        checks.flag(self.name, "alternate", self.alternate)

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback, even=not self.alternate)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite",) if self.start_after else ()

    def accepts(self, slot: Slot) -> bool:
        if len(slot.shape) < 2:
            return False
        n, m, r = self._dimensions(slot)
        return r * (n + m) < n * m

    def init(self, layout: Layout) -> PowerSGDState:
        n, m, r = self._dimensions(_only(layout))
        error = torch.zeros(layout.numel if self.feedback else 0, device=layout.device)
        p = torch.zeros(n if self.alternate else 0, r, device=layout.device)
        return PowerSGDState(error, p, torch.zeros(m, r, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: PowerSGDState, ch: Channel) -> None:
        if ch.step < self.start_after:
            await ch.mean(x, out)
            await ch.settled(kernels.all_finite(out))
            return
        matrix = (x + state.error if self.feedback else x.float()).view(-1, state.q.shape[0])
        if self.alternate:
            await self._one_factor(matrix, out, state, ch)
        else:
            await self._both_factors(matrix, out, state, ch)

    async def _both_factors(
        self, matrix: torch.Tensor, out: torch.Tensor, state: PowerSGDState, ch: Channel
    ) -> None:
        p = await ch.mean(matrix @ self._start(state.q, ch))
        if not bool(p.isfinite().all()):  # equal on all ranks, so all of them leave out the second round
            await ch.settled(False)
            return
        p = _orthogonal(p)
        mine = matrix.T @ p
        q = await ch.mean(mine)
        if await ch.settled(bool(q.isfinite().all())):
            state.q.copy_(q)
            if self.feedback:
                state.error.copy_((matrix - p @ mine.T).view(-1))
        out.copy_((p @ q.T).view(-1))

    async def _one_factor(
        self, matrix: torch.Tensor, out: torch.Tensor, state: PowerSGDState, ch: Channel
    ) -> None:
        n, m = matrix.shape
        # The longer factors of all tensors travel in the same steps, so that `payload_bytes` is one step's.
        sends_p = (n >= m) == (ch.step % 2 == 0)
        if not sends_p:  # the same, of the transposed matrix
            matrix = matrix.T
        sent, used = (state.p, state.q) if sends_p else (state.q, state.p)
        basis = _orthogonal(self._start(used, ch))
        mine = matrix @ basis
        factor = await ch.mean(mine)
        if await ch.settled(bool(factor.isfinite().all())):
            sent.copy_(factor)
            if self.feedback:
                error = matrix - mine @ basis.T
                state.error.copy_((error if sends_p else error.T).reshape(-1))
        product = factor @ basis.T
        out.copy_((product if sends_p else product.T).reshape(-1))

    def _start(self, factor: torch.Tensor, ch: Channel) -> torch.Tensor:
        """The last step's factor, or a random one, equal on all ranks."""
        if self.warm_start and bool(factor.any()):
            return factor
        return torch.randn(factor.shape, generator=ch.shared_rng(), device=factor.device)

    def exact(self) -> Exchange:
        """Full rank: no matrix is worth it any more, and all go dense."""
        return replace(self, rank=2**31)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        n, m, r = self._dimensions(_only(layout))
        return r * (max(n, m) if self.alternate else n + m) * 4

    def _dimensions(self, slot: Slot) -> tuple[int, int, int]:
        n = slot.shape[0] if slot.shape else 1
        m = slot.numel // n if n else 0
        return n, m, min(self.rank, n, m)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.linalg.qr(matrix)[0])


def _only(layout: Layout) -> Slot:
    (slot,) = layout.slots
    return slot
