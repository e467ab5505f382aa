"""Low-rank approximation by one step of the power method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, replicated, residual
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.methods.families.memories import DenseMemory


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
        return Traits(conserves=self.feedback, payload="alternating" if self.alternate else "fixed")

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback")

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        if small or len(slot.shape) < 2:
            return None
        n, m, r = self._dimensions(slot)
        return self if r * (n + m) < n * m else None

    def init(self, layout: Layout) -> PowerSGDState:
        n, m, r = self._dimensions(_only(layout))
        error = torch.zeros(layout.numel if self.feedback else 0, device=layout.device)
        p = torch.zeros(n if self.alternate else 0, r, device=layout.device)
        return PowerSGDState(error, p, torch.zeros(m, r, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: PowerSGDState, ch: Channel) -> None:
        if ch.step < self.start_after:
            await ch.mean(x, out)
            await ch.commit(kernels.all_finite(out))
            return
        with DenseMemory(state.error, x, out) as memory:
            if self.alternate:
                await self._one_factor(memory, out, state, ch)
            else:
                await self._both_factors(memory, out, state, ch)

    async def _both_factors(
        self, memory: DenseMemory, out: torch.Tensor, state: PowerSGDState, ch: Channel
    ) -> None:
        matrix = memory.total.float().view(-1, state.q.shape[0])
        p = await ch.mean(matrix @ self._start(state.q, ch))
        if not bool(p.isfinite().all()):  # equal on all ranks, so all of them leave out the second round
            await ch.commit(False)
            return
        p = _orthogonal(p)
        mine = matrix.T @ p
        q = await ch.mean(mine)
        keep = await ch.commit(bool(q.isfinite().all()))
        if keep:
            state.q.copy_(q)
        _finish(memory.close(keep), (p, mine.T), (p, q.T), out)

    async def _one_factor(
        self, memory: DenseMemory, out: torch.Tensor, state: PowerSGDState, ch: Channel
    ) -> None:
        matrix = memory.total.float().view(-1, state.q.shape[0])
        n, m = matrix.shape
        # The longer factors of all tensors travel in the same steps, so that `payload_bytes` is one step's.
        sends_p = (n >= m) == (ch.step % 2 == 0)
        sent, used = (state.p, state.q) if sends_p else (state.q, state.p)
        basis = _orthogonal(self._start(used, ch))
        mine = (matrix if sends_p else matrix.T) @ basis
        factor = await ch.mean(mine)
        keep = await ch.commit(bool(factor.isfinite().all()))
        if keep:
            sent.copy_(factor)
        error = memory.close(keep)
        if sends_p:
            _finish(error, (mine, basis.T), (factor, basis.T), out)
        else:
            _finish(error, (basis, mine.T), (basis, factor.T), out)

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


def _finish(
    error: torch.Tensor | None,
    mine: tuple[torch.Tensor, torch.Tensor],
    mean: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """error -= the product of this rank's factors;  out = the product of the mean ones."""
    shape = (mine[0].shape[0], mine[1].shape[1])
    if error is not None:
        error.view(shape).addmm_(*mine, alpha=-1)
    if out.dtype == torch.float32:
        torch.mm(*mean, out=out.view(shape))
    else:
        out.copy_((mean[0] @ mean[1]).view(-1))


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.linalg.qr(matrix)[0])


def _only(layout: Layout) -> Slot:
    (slot,) = layout.slots
    return slot
